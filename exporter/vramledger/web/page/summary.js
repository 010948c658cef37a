// The whole host in one line, and a button for each state that a holder is in.

import { arrange, attribute, byId, element, Text } from "./elements.js";
import { bytes, percent } from "./format.js";
import { part, PARTS, slight, STATES } from "./model.js";

const MEANINGS = {
  active: "works, or may work", idle: "no GPU work for a long time", stopped: "stopped by a signal or debugger",
  orphaned: "worker of a program that has ended", zombie: "exited, bytes still held",
  stuck: "waits in the driver, no signal ends it", dead: "no such process",
  unknown: "cannot be seen from here",
};

/** A bar of all parts; only their widths change. */
export class Bar {
  constructor() {
    this.segments = new Map(PARTS.map((name) => [name, element("span", { class: `segment part-${name}` })]));
    this.node = element("div", { class: "bar", role: "img" }, ...this.segments.values());
  }

  show(sizes, total) {
    const words = [];
    for (const [name, made] of this.segments) {
      const size = sizes(name) ?? 0;
      const width = `${((size / total) * 100).toFixed(3)}%`;
      if (made.style.width !== width) made.style.width = width;
      made.hidden = !size;
      attribute(made, "data-slight", slight(name, size, total) ? "" : null);
      if (size) words.push(`${name} ${bytes(size)}`);
    }
    attribute(this.node, "aria-label", `Of ${bytes(total)}: ${words.join(", ")}`);
  }
}

export class Summary {
  constructor(onChoose) {
    this.bar = new Bar();
    this.line = new Text();
    this.waste = new Text();
    this.buttons = new Map(STATES.map((state) => [state, button(state, onChoose)]));
    byId("total").append(
      element("p", { class: "headline" }, element("span", {}, this.line.node), element("span", { class: "waste" }, this.waste.node)),
      this.bar.node,
    );
  }

  show(model, chosen) {
    const ledgers = model.devices.filter((device) => !device.memory_counted_under).map((device) => device.memory).filter(Boolean);
    byId("summary").hidden = !ledgers.length;
    if (!ledgers.length) return;
    const sum = (name) => ledgers.reduce((whole, memory) => whole + (part(memory, name) ?? 0), 0);
    const total = sum("total");
    const waste = [["wasted", "held without work"], ["perhaps_wasted", "idle or orphaned, not proven"]].map(([name, words]) => {
      const size = sum(name);
      return size ? `${bytes(size)} (${percent(size / total)}) ${words}` : "";
    }).filter(Boolean);
    this.line.set(`${bytes(sum("used"))} of ${bytes(total)} used on ${count(ledgers.length, "device")}`);
    this.waste.set(waste.join(", ") || "nothing held without work");
    this.bar.show(sum, total);
    const holders = new Map(STATES.map((state) => [state, 0]));
    for (const [, row] of model.holders) holders.set(row.state, holders.get(row.state) + 1);
    const shown = [];
    for (const [state, made] of this.buttons) {
      if (!holders.get(state) && !chosen.has(state)) continue;
      made.size.set(bytes(sum(state)));
      made.count.set(count(holders.get(state), "holder"));
      attribute(made.node, "aria-pressed", chosen.has(state));
      shown.push(made.node);
    }
    arrange(byId("states"), shown);
  }
}

/** A number with its noun. */
export const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function button(state, onChoose) {
  const size = new Text();
  const holders = new Text();
  const node = element(
    "button", { type: "button", class: "state-button", "data-state": state, title: MEANINGS[state], onclick: () => onChoose(state) },
    element("span", { class: `swatch part-${state}`, "aria-hidden": "true" }),
    element("span", { class: "name" }, state), " ",
    element("span", { class: "size" }, size.node), " ",
    element("span", { class: "faint" }, holders.node),
  );
  return { node, size, count: holders };
}
