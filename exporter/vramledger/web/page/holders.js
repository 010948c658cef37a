// The table of holders: sorted, filtered, and changed cell by cell, so that it does not scroll or lose the focus.

import { arrange, attribute, byId, element, prose, Text } from "./elements.js";
import { bytes, change, moment, percent, span, UNKNOWN } from "./format.js";
import { count } from "./summary.js";

const WORST_FIRST = ["dead", "zombie", "stuck", "orphaned", "stopped", "idle", "unknown", "active"];

// Title, sort key, whether the largest comes first, and a class for narrow screens.
const COLUMNS = [
  { id: "state", title: "State, since", by: (row) => WORST_FIRST.indexOf(row.state) },
  { id: "gpu", title: "GPU", by: (row) => row.gpu },
  { id: "pid", title: "PID", by: (row) => row.pid, wide: true },
  { id: "owner", title: "Owner, program", by: (row) => `${owner(row)} ${row.command ?? ""}`.toLowerCase() },
  { id: "memory", title: "Memory", by: (row) => row.held, falling: true },
  { id: "growth", title: "Growth", by: (row) => row.growth?.bytes ?? null, falling: true, wide: true },
  { id: "framework", title: "Framework, policy", by: (row) => `${known(row.framework)} ${known(row.policy)}`, wide: true },
  { id: "quiet", title: "No work for", by: (row) => (row.working_now ? -Infinity : row.quiet_since === null ? null : -row.quiet_since), falling: true, wide: true },
  { id: "todo", title: "What to do", by: (row) => row.what_to_do ?? "", wide: true, last: true },
];

// The exporter's sentences for these states contain a number of seconds that grows; the page shows these instead.
const REASONS = { idle: "no sign of GPU work since then", active: "it works, or has not been quiet for long enough, or the driver does not report work" };

const known = (name) => (name && name !== "unknown" ? name : "");

function owner(row) {
  if (row.owner && row.owner.type !== "user") return row.owner.name;
  return row.user ?? row.owner?.name ?? "";
}

// The notebook is what the program calls itself, so it stands with the program and not in the place of its owner.
const program = (row) => [row.command || "unknown program", row.owner?.notebook].filter(Boolean).join(", ");

export class Holders {
  constructor(onFilter) {
    this.rows = new Map();
    this.sorted = { column: COLUMNS.find((column) => column.id === "memory"), falling: true };
    this.states = new Set();
    this.gpus = "";
    this.order = "";
    this.filter = { words: [], gpu: "" };
    this.onFilter = onFilter;
    this.heads = COLUMNS.map((column) => this.head(column));
    byId("columns").append(...this.heads, element("th", { scope: "col", class: "more" }, element("span", { class: "unseen" }, "Details")));
    byId("find").addEventListener("input", (event) => {
      this.filter.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
      onFilter();
    });
    byId("gpu").addEventListener("change", (event) => {
      this.filter.gpu = event.target.value;
      onFilter();
    });
    byId("reset").addEventListener("click", () => {
      this.states.clear();
      this.filter = { words: [], gpu: "" };
      byId("find").value = byId("gpu").value = "";
      onFilter();
      byId("find").focus();
    });
  }

  head(column) {
    const press = element("button", { type: "button", onclick: () => this.sort(column) }, column.title);
    const classes = `${column.wide ? "wide " : ""}column-${column.id}`;
    const head = element("th", { scope: "col", class: classes }, press);
    if (column === this.sorted.column) head.setAttribute("aria-sort", "descending");
    return head;
  }

  sort(column) {
    const again = this.sorted.column === column;
    this.sorted = { column, falling: again ? !this.sorted.falling : Boolean(column.falling) };
    COLUMNS.forEach((each, place) => {
      attribute(this.heads[place], "aria-sort", each === column ? (this.sorted.falling ? "descending" : "ascending") : null);
    });
    this.onFilter();
  }

  /** Show the holders in one more state, or hide them again. */
  choose(state) {
    if (!this.states.delete(state)) this.states.add(state);
    this.onFilter();
  }

  fits(row) {
    if (this.states.size && !this.states.has(row.state)) return false;
    if (this.filter.gpu && row.uuid !== this.filter.gpu) return false;
    if (!this.filter.words.length) return true;
    const text = `${row.pid} ${row.user ?? ""} ${owner(row)} ${row.owner?.type ?? ""} ${row.owner?.namespace ?? ""} ${row.command ?? ""} ${known(row.framework)} ${known(row.policy)} ${row.state} ${row.unreserved ? "unreserved" : ""}`.toLowerCase();
    return this.filter.words.every((word) => text.includes(word));
  }

  compare(one, other) {
    const { column, falling } = this.sorted;
    const [first, second] = [column.by(one[1]), column.by(other[1])];
    if (first === null || second === null) {
      if (first !== second) return first === null ? 1 : -1; // unknown values come last in both directions
    } else if (first !== second) return (first < second ? -1 : 1) * (falling ? -1 : 1);
    return (other[1].held ?? -1) - (one[1].held ?? -1) || (one[0] < other[0] ? -1 : 1);
  }

  /** Bring the table up to date; `forced` also puts rows in order while one of them has the focus. */
  show(model, forced) {
    const now = model.host.time;
    byId("holders").hidden = !model.host.up;
    this.offer(model.devices);
    const totals = new Map(model.devices.map((device) => [device.uuid, device.memory?.total ?? null]));
    const fitting = model.holders.filter(([, row]) => this.fits(row)).sort((one, other) => this.compare(one, other));
    for (const key of this.rows.keys()) if (!model.rows.has(key)) this.rows.delete(key);
    const shown = [];
    for (const [key, row] of fitting) {
      let line = this.rows.get(key);
      if (!line) this.rows.set(key, (line = new Line(row)));
      if (line.row !== row) line.show(row, totals.get(row.uuid));
      line.tick(now);
      shown.push(line.node);
      if (line.more) shown.push(line.more);
    }
    const body = byId("rows");
    // Moving a row takes the focus from it, so rows stay where they are while one of them is in use.
    const settled = forced || !body.contains(document.activeElement) || shown.length !== body.children.length;
    if (settled) arrange(body, shown);
    this.say(fitting.length, model);
  }

  say(fitting, model) {
    const all = model.holders.length;
    const filtered = Boolean(this.states.size || this.filter.gpu || this.filter.words.length);
    byId("reset").hidden = !filtered;
    const words = filtered ? `${fitting.toLocaleString("en")} of ${count(all, "holder")}` : count(all, "holder");
    if (byId("count").textContent !== words) byId("count").textContent = words;
    byId("table").hidden = !fitting;
    byId("empty").hidden = Boolean(fitting);
    const empty = all ? "No holder matches." : "No process holds GPU memory.";
    byId("empty").textContent = all || model.host.host_pid_namespace !== false ? empty : "Holders cannot be seen from here.";
  }

  offer(devices) {
    const gpus = devices.map((device) => device.uuid).join();
    if (gpus === this.gpus) return;
    this.gpus = gpus;
    const chosen = this.filter.gpu;
    const options = devices.map((device) =>
      element("option", { value: device.uuid }, [device.gpu, device.mig_profile, device.mig_placement ? `at ${device.mig_placement}` : ""].filter((each) => each !== null && each !== "").join(" ")));
    byId("gpu").replaceChildren(element("option", { value: "" }, "all"), ...options);
    byId("gpu").value = chosen;
    if (byId("gpu").value !== chosen) this.filter.gpu = byId("gpu").value = "";
  }
}

/** One holder: its row, and a second one with the evidence when it is opened. */
class Line {
  constructor(row) {
    this.row = null;
    this.more = null;
    this.text = Object.fromEntries(
      ["state", "since", "gpu", "pid", "owner", "command", "memory", "share", "used", "growth", "over", "framework", "policy", "quiet"]
        .map((name) => [name, new Text()]),
    );
    const { text } = this;
    this.swatch = element("span", { class: "swatch", "aria-hidden": "true" });
    this.todo = element("td", { class: "column-todo wide" });
    this.hint = element("span", { class: "hint", "aria-hidden": "true" }, "What to do ›"); // where its column has no room
    this.told = "";
    this.fill = element("span", { class: "fill", "aria-hidden": "true" });
    this.press = element("button", { type: "button", class: "disclose", "aria-expanded": "false", "aria-label": `Details of pid ${row.pid}`, onclick: () => this.toggle() }, "›");
    const two = (one, other) => [element("span", { class: "first" }, text[one].node), element("span", { class: "second" }, text[other].node)];
    this.node = element(
      "tr", { "data-state": row.state },
      element("td", { class: "column-state" }, this.swatch, ...two("state", "since")),
      element("td", { class: "column-gpu" }, text.gpu.node),
      element("td", { class: "column-pid wide" }, text.pid.node),
      element("th", { scope: "row", class: "column-owner" }, ...two("owner", "command"), this.hint),
      element("td", { class: "column-memory" }, ...two("memory", "share"), element("span", { class: "used-inside" }, text.used.node), this.fill),
      element("td", { class: "column-growth wide" }, ...two("growth", "over")),
      element("td", { class: "column-framework wide" }, ...two("framework", "policy")),
      element("td", { class: "column-quiet wide" }, text.quiet.node),
      this.todo,
      element("td", { class: "more" }, this.press),
    );
    // The whole row opens, except where a person chooses text or presses the button itself.
    this.node.addEventListener("click", (event) => {
      if (!event.target.closest("button, a") && !String(getSelection())) this.toggle();
    });
  }

  show(row, total) {
    this.row = row;
    this.total = total;
    const { text } = this;
    attribute(this.node, "data-state", row.state);
    attribute(this.swatch, "class", `swatch part-${row.state}`);
    attribute(this.fill, "class", `fill part-${row.state}`);
    text.state.set(row.state);
    text.gpu.set(String(row.gpu));
    text.pid.set(String(row.pid));
    text.owner.set(owner(row) || "unknown owner");
    text.command.set(program(row));
    text.memory.set(bytes(row.held));
    const share = total && row.held !== null ? row.held / total : null;
    const used = inUse(row);
    text.share.set(share === null ? "" : percent(share));
    text.used.set(used === null ? "" : `${bytes(used)} in use`);
    const width = `${((share ?? 0) * 100).toFixed(1)}%`;
    if (this.fill.style.width !== width) this.fill.style.width = width;
    const grown = row.growth?.bytes;
    text.growth.set(grown === undefined ? UNKNOWN : grown ? change(grown) : "steady");
    text.over.set(grown === undefined ? "" : `in ${span(row.growth.seconds)}`);
    text.framework.set(known(row.framework) || UNKNOWN);
    text.policy.set(known(row.policy));
    this.hint.hidden = !row.what_to_do;
    if (this.told !== (row.what_to_do ?? "")) {
      this.told = row.what_to_do ?? "";
      this.todo.replaceChildren(...prose(this.told));
    }
    if (this.more) this.detail();
  }

  /** Update what changes only with the clock. */
  tick(now) {
    const { row, text } = this;
    text.since.set(row.since ? `for ${span(now - row.since)}${row.state === "idle" ? `, ${row.grade}` : ""}` : "");
    text.quiet.set(row.working_now ? "working" : row.quiet_since === null ? UNKNOWN : span(now - row.quiet_since));
  }

  toggle() {
    if (this.more) {
      this.more.remove();
      this.more = null;
    } else {
      this.facts = element("dl", {});
      this.more = element("tr", { class: "details" }, element("td", { colspan: "10" }, this.facts));
      this.detail();
      this.node.after(this.more);
    }
    attribute(this.press, "aria-expanded", Boolean(this.more));
  }

  detail() {
    const { row } = this;
    const facts = [
      ["What to do", row.what_to_do ?? "Nothing: it works, or may work."],
      ["State", `${row.state} (${row.grade}) since ${moment(row.since)}: ${row.why ?? REASONS[row.state]}`],
      ["Last sign of work", row.working_now ? "now" : row.last_active === null ? "none was seen" : moment(row.last_active)],
      ["GPU use", row.sm_utilization === null ? "no sample for it" : percent(row.sm_utilization)],
      ["Memory", `${bytes(row.held)} now, ${bytes(row.peak)} at most${row.uncharged ? " by NVML" : ""}${row.growth?.bytes ? `, ${change(row.growth.bytes)} in ${span(row.growth.seconds)}` : ""}`],
      ...(row.uncharged ? [["Uncharged", `${row.uncharged.why} (${row.uncharged.grade})`]] : []),
      ...(row.kv_cache ? [["KV cache", cache(row.kv_cache)]] : []),
      ...inside(row),
      ["Framework", known(row.framework) ? `${row.framework}, policy ${known(row.policy) || "not known"}: ${row.policy_why ?? ""}` : row.policy_why ?? "not known"],
      ["Process", `pid ${row.pid}, ${row.command || "unknown program"}${row.started === null ? "" : `, started ${moment(row.started)}`}`],
      ["Owner", ownerInFull(row)],
      ...(row.unreserved ? [["Reservation", "None: its owner has not reserved this GPU; other owners may have."]] : []),
      ["Device", `GPU ${row.gpu}, ${row.uuid}`],
    ];
    this.facts.replaceChildren(...facts.flatMap(([term, words]) => [element("dt", {}, term), element("dd", {}, ...prose(words))]));
  }
}

const CAUSES = { too_big: "it was too big", fragmented: "the memory is in pieces", hoarded: "other processes hold the memory", leaking: "the memory that the program uses grows" };

/** What the holder's own vLLM server says of its KV cache. */
function cache(told) {
  const size = told.memory === null ? "size not known" : `${bytes(told.memory)} of what it holds`;
  const tokens = told.tokens === null ? "" : `, ${told.tokens.toLocaleString("en")} tokens`;
  const used = told.usage === null ? "use not known" : `${percent(told.usage)} in use by requests`;
  return `${size}${tokens}, ${used}; its vLLM server says so`;
}

/** Bytes that the frameworks' programs use now; null where the agent does not report all of them. */
function inUse(row) {
  const told = row.agent?.frameworks ?? [];
  return told.length && told.every((each) => each.in_use !== null) ? told.reduce((sum, each) => sum + each.in_use, 0) : null;
}

/** What the holder's own agent reports: bytes in use, the pool, bytes that could be freed, errors. */
function inside(row) {
  const { agent } = row;
  if (!agent) return [];
  const found = agent.frameworks.map((each) => {
    const parts = [`${bytes(each.in_use)} in use of ${bytes(each.pool)} taken from the driver`];
    if (each.reclaimable) parts.push(`${bytes(each.reclaimable)} could be freed${agent.consents.includes("reclaim") ? `: \`vramledger reclaim ${row.pid}\`` : ""}`);
    return [`In ${each.title}`, parts.join("; ")];
  });
  if (agent.overhead !== null) found.push(["Beyond that", `${bytes(agent.overhead)}: context, libraries, other code`]);
  if (agent.needed_peak !== null) found.push(["Peak need", bytes(agent.needed_peak)]);
  if (agent.last_oom) {
    const cause = CAUSES[agent.last_oom.verdict] ?? "the cause is not known";
    found.push(["Out of memory", `${moment(agent.last_oom.time)}, ${bytes(agent.last_oom.requested)} requested: ${cause}`]);
  }
  found.push(["Agent", agent.up ? "reports" : `${agent.problem}: ${agent.why ?? "no reason known"}`]);
  return found;
}

function ownerInFull(row) {
  const user = row.user ? `user ${row.user}` : "user not known";
  if (!row.owner) return user;
  const more = ["namespace", "pod", "container", "slurm_job", "unit", "notebook"]
    .filter((name) => row.owner[name] && row.owner[name] !== row.owner.name)
    .map((name) => `${name.replace("_", " ")} ${row.owner[name]}`);
  return [row.owner.type === "user" ? null : `${row.owner.type} ${row.owner.name}`, ...more, user].filter(Boolean).join(", ");
}
