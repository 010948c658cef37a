// A card for each device: its ledger as a bar, the last 15 minutes, and the bytes that no holder in the table has.
// The cards of devices without holders come after the table.

import { arrange, attribute, byId, element, prose, Text } from "./elements.js";
import { bytes, moment, percent } from "./format.js";
import { Chart } from "./chart.js";
import { part, PARTS, slight } from "./model.js";
import { Bar } from "./summary.js";

export class Devices {
  constructor() {
    this.cards = new Map();
  }

  show(model) {
    const held = new Map();
    for (const [, row] of model.holders) held.set(row.uuid, [...(held.get(row.uuid) ?? []), row]);
    const [shown, free] = [[], []];
    for (const device of model.devices) {
      let card = this.cards.get(device.uuid);
      if (!card) this.cards.set(device.uuid, (card = new Card(device)));
      if (model.changed.has(device.uuid)) card.show(device);
      if (device.memory) card.chart.draw(model.past, device.uuid, device.memory.total, held.get(device.uuid) ?? []);
      (held.size && !held.has(device.uuid) && plain(device) ? free : shown).push(card.node);
    }
    for (const uuid of this.cards.keys()) if (!model.rows.has(uuid)) this.cards.delete(uuid);
    for (const [place, section, cards] of [["devices", "devices-section", shown], ["free", "free-section", free]]) {
      byId(section).hidden = !cards.length;
      attribute(byId(place), "data-many", shown.length + free.length > 2 ? "" : null);
      arrange(byId(place), cards);
    }
  }
}

class Card {
  constructor(device) {
    this.used = new Text();
    this.busy = new Text();
    this.why = new Text();
    this.note = element("p", { class: "note faint", hidden: true }, this.why.node);
    this.ghost = element("p", { class: "ghost", hidden: true }, "Busy for minutes at idle power, and no process uses it. On some GPUs the next CUDA program clears this; if it stays, reset the GPU.");
    this.bar = new Bar();
    this.chart = new Chart(`GPU ${device.gpu}: its ledger over the last 15 minutes, stacked to the total`);
    this.legend = element("dl", { class: "legend" });
    this.parts = new Map();
    this.body = element(
      "div", {}, this.bar.node,
      element("div", { class: "plot" }, this.chart.node, element("p", { class: "axis", "aria-hidden": "true" }, element("span", {}, "15 min ago"), element("span", {}, "now"))),
      this.legend,
    );
    this.extras = element("div", { class: "extras" });
    this.reserved = new Text();
    this.reserving = element("p", { class: "reserved", hidden: true }, this.reserved.node);
    this.limited = new Text();
    this.limiting = element("p", { class: "limits", hidden: true }, this.limited.node);
    this.told = "";
    const profile = device.name?.endsWith(device.mig_profile) ? "" : device.mig_profile;
    const name = [device.name?.replace(/^NVIDIA /, ""), profile, device.mig_placement ? `at ${device.mig_placement}` : ""].filter(Boolean).join(" ");
    this.node = element(
      "article", { class: "card", "aria-label": `GPU ${device.gpu}` },
      element("h3", {}, `GPU ${device.gpu} `, element("small", {}, name || "unnamed device")),
      element("p", { class: "used" }, this.used.node),
      element("p", { class: "busy faint" }, this.busy.node),
      element("p", { class: "uuid faint" }, device.uuid),
      this.note, this.ghost, this.body, this.reserving, this.limiting, this.extras,
    );
  }

  show(device) {
    const { memory } = device;
    this.body.hidden = !memory;
    this.note.hidden = Boolean(memory);
    attribute(this.node, "data-down", device.up ? null : "");
    this.why.set(reason(device));
    this.busy.set(device.utilization === null ? "" : `GPU busy ${percent(device.utilization)}`);
    this.ghost.hidden = !device.ghost;
    this.used.set(memory ? `${bytes(memory.used)} of ${bytes(memory.total)}` : "");
    if (memory) {
      this.bar.show((name) => part(memory, name), memory.total);
      this.list(memory);
    }
    const words = reservations(device);
    this.reserving.hidden = !words;
    this.reserved.set(words);
    const bounds = limits(device);
    this.limiting.hidden = !bounds;
    this.limited.set(bounds);
    this.explain(device);
  }

  list(memory) {
    const shown = [];
    for (const name of PARTS) {
      const size = part(memory, name);
      if (!size) continue;
      if (!this.parts.has(name)) {
        const text = new Text();
        const made = element(
          "div", {}, element("dt", {}, element("span", { class: `swatch part-${name}`, "aria-hidden": "true" }), name.replace("_", " ")),
          element("dd", {}, text.node),
        );
        this.parts.set(name, { text, made });
      }
      this.parts.get(name).text.set(bytes(size));
      attribute(this.parts.get(name).made, "data-slight", slight(name, size, memory.total) ? "" : null);
      shown.push(this.parts.get(name).made);
    }
    arrange(this.legend, shown);
  }

  /** Unattributed memory, overlap and hidden holders, each with its explanation. */
  explain(device) {
    const told = JSON.stringify([device.memory?.unattributed, device.memory?.overlap, device.about_unattributed, device.memory?.operating_system, device.about_operating_system, device.undivided, device.left_behind, device.hidden]);
    if (told === this.told) return;
    this.told = told;
    const open = this.extras.querySelector("details")?.open ?? false;
    const lines = [];
    if (device.memory?.unattributed) {
      lines.push(element("li", {}, element("strong", {}, `Unattributed ${bytes(device.memory.unattributed)}. `), ...prose(device.about_unattributed)));
    }
    if (device.memory?.operating_system) {
      lines.push(element("li", {}, element("strong", {}, `Operating system ${bytes(device.memory.operating_system)}. `), ...prose(device.about_operating_system)));
    }
    if (device.undivided) {
      const words = `NVML charges it to nobody; it is in one or several of pid ${device.undivided.pids.slice(0, 8).join(", ")}. It counts as ${device.undivided.state}.`;
      lines.push(element("li", {}, element("strong", {}, `Undivided ${bytes(device.undivided.bytes)}. `), words));
    }
    for (const each of device.left_behind ?? []) {
      const heirs = each.pids.length ? `Pid ${each.pids.slice(0, 8).join(", ")} can have it.` : "No process that NVML lists can have it.";
      const words = `Pid ${each.pid} of ${each.user ?? "an unknown user"} created it and ended at ${moment(each.ended)}. ${heirs}`;
      lines.push(element("li", {}, element("strong", {}, `Left behind ${bytes(each.most)}. `), words));
    }
    if (device.memory?.overlap) {
      const words = "The holdings add up to more than is used: holders share memory, or the readings are a moment apart.";
      lines.push(element("li", {}, element("strong", {}, `Overlap ${bytes(device.memory.overlap)}. `), words));
    }
    for (const each of device.hidden ?? []) {
      const who = `Hidden: pid ${each.pid} ${each.command || "unknown program"} (${each.user ?? "unknown user"}). `;
      lines.push(element("li", {}, element("strong", {}, who), ...prose(each.about)));
    }
    const hidden = (device.hidden ?? []).length;
    const title = [device.memory?.unattributed ? `${bytes(device.memory.unattributed)} unattributed` : "", device.undivided ? `${bytes(device.undivided.bytes)} undivided` : "", hidden ? `${hidden} hidden` : ""];
    this.extras.replaceChildren(
      ...(lines.length
        ? [element("details", { open }, element("summary", {}, `Unowned: ${title.filter(Boolean).join(", ") || (device.memory?.overlap ? "overlap" : "operating system")}`), element("ul", {}, ...lines))]
        : []),
    );
  }
}

/** The owners for whom schedulers have reserved the device, and whether they hold memory; empty without a scheduler. */
function reservations(device) {
  if (!device.reservations) return "";
  const held = (each) => (each.held === null ? "whether it holds memory is unknown" : each.held ? "holds memory here" : "holds nothing here");
  const owners = device.reservations.map((each) => `${each.owner_type} ${each.owner} (${held(each)})`);
  return `Reserved by ${device.schedulers.join(" and ")} for ${owners.join(", ") || "no owner"}.`;
}

/** What owners may take by their cgroups, and what NVML shows of the device at all; empty without a limit. */
function limits(device) {
  const taken = (each) => (each.used === null ? "how much of it is taken is unknown" : `${bytes(each.used)}${each.maximum ? ` (${percent(each.used / each.maximum)})` : ""} of it is taken`);
  const owners = device.limits.filter((each) => each.maximum !== null).map((each) => `${each.type} ${each.name} may take ${bytes(each.maximum)}, and ${taken(each)} (${each.cgroup})`);
  const words = owners.length ? [`Limited by cgroup: ${owners.join("; ")}.`] : [];
  if (device.partition !== null) words.push(`The exporter itself is in a partition of ${bytes(device.partition)}: NVML shows no more than that of this GPU.`);
  return words.join(" ");
}

/** Whether the card says nothing but the ledger. */
function plain(device) {
  const { memory } = device;
  return Boolean(device.up && memory && slight("unattributed", memory.unattributed, memory.total)) && !device.ghost && !device.undivided && !device.hidden?.length && !device.left_behind?.length;
}

function reason(device) {
  if (device.error === "asleep") return "Asleep: it was not asked, as this would wake it. What it holds is not known.";
  if (!device.up) return `This device does not answer (${device.error ?? "failed"}). Its present state is not known.`;
  if (device.divided) return "Divided into MIG instances, which hold the memory.";
  return "The driver reports no memory figures for it.";
}
