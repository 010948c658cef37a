// A device's last 15 minutes as a stacked area, redrawn only when a step has passed.

import { arrange, drawing } from "./elements.js";
import { PARTS } from "./model.js";

const STACKED = PARTS.filter((name) => name !== "free"); // free is the background behind them

export class Chart {
  constructor(label) {
    this.areas = new Map();
    this.title = drawing("title", {}, label);
    this.node = drawing("svg", { class: "chart", viewBox: "0 0 180 100", preserveAspectRatio: "none", role: "img" }, this.title);
    this.version = "";
  }

  /** Draw the past of a device, the newest step at the right edge. */
  draw(past, uuid, total, holders) {
    const idle = holders.filter((row) => row.state === "idle" && row.held);
    const token = `${past.version} ${idle.map((row) => `${row.pid} ${row.since}`).join()}`;
    if (this.version === token) return;
    this.version = token;
    const steps = since(idle, past.devices.get(uuid) ?? new Map(), past.step);
    const first = past.newest - past.length + 1;
    const base = new Map(); // step to the height so far
    for (let number = first; number <= past.newest; number += 1) if (steps.has(number)) base.set(number, 0);
    const drawn = [this.title];
    for (const name of STACKED) {
      const outline = area(name, steps, base, first, total);
      if (!outline) continue;
      for (const made of this.paths(name)) {
        if (made.getAttribute("d") !== outline) made.setAttribute("d", outline);
        drawn.push(made);
      }
    }
    arrange(this.node, drawn);
  }

  paths(name) {
    if (!this.areas.has(name)) {
      this.areas.set(name, [
        drawing("path", { class: `area part-${name}` }),
        drawing("path", { class: `area-texture part-${name}` }),
      ]);
    }
    return this.areas.get(name);
  }
}

/** The steps, with what is idle now as idle since its last sign of work: for minutes that was not known yet. */
function since(idle, steps, step) {
  if (!idle.length) return steps;
  const told = new Map();
  for (const [number, parts] of steps) {
    const quiet = idle.reduce((sum, row) => sum + (row.since <= number * step ? row.held : 0), 0);
    const late = Math.max(0, Math.min(quiet - parts.idle, parts.active));
    told.set(number, late ? { ...parts, active: parts.active - late, idle: parts.idle + late } : parts);
  }
  return told;
}

/** The outline of one part over all steps, empty when the part has no bytes; a gap stays a gap. */
function area(name, steps, base, first, total) {
  let outline = "";
  let upper = [];
  let lower = [];
  let some = false;
  const end = () => {
    if (upper.length) outline += `M${upper.join("L")}L${lower.reverse().join("L")}Z`;
    upper = [];
    lower = [];
  };
  let before = null;
  for (const [number, stacked] of base) {
    const size = (steps.get(number)[name] / total) * 100;
    const top = stacked + size;
    if (before !== null && number !== before + 1) end();
    before = number;
    base.set(number, top);
    if (size > 0) some = true;
    const left = number - first;
    upper.push(`${left} ${(100 - top).toFixed(2)}`, `${left + 1} ${(100 - top).toFixed(2)}`);
    lower.push(`${left} ${(100 - stacked).toFixed(2)}`, `${left + 1} ${(100 - stacked).toFixed(2)}`);
  }
  end();
  return some ? outline : "";
}
