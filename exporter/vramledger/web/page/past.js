// The past: a slider over what is stored, with each device's bytes and what happened as its scale.

import { arrange, byId, drawing, element, Text } from "./elements.js";
import { moment } from "./format.js";
import { Model } from "./model.js";

const PAUSE = 150; // ms without a movement before a moment is requested
const REFRESH = 60000; // ms after which the scale of the present is requested again
const BAD = ["dead", "zombie", "stuck", "orphaned", "oom", "lost"];
let version = -1; // a chart that has drawn nothing has this one

/** A moment in the address, in seconds, or with 12 or more digits in milliseconds as Grafana gives it: #at=1795234210 */
const fromAddress = () => {
  const found = /^#at=(\d{1,14})$/.exec(location.hash);
  if (!found) return null;
  return found[1].length < 12 ? Number(found[1]) : Math.floor(Number(found[1]) / 1000);
};

export class Travel {
  /** Call `onChange` when another moment is to be shown. */
  constructor(onChange) {
    this.onChange = onChange;
    this.model = null; // what is shown of the past, null while the page is live
    this.answer = null;
    this.asked = null;
    this.problem = "";
    this.scale = null;
    this.timer = 0;
    this.request = null;
    this.slider = byId("past-slider");
    this.words = new Text();
    byId("past-words").append(this.words.node);
    this.slider.addEventListener("input", () => this.move(Number(this.slider.value)));
    byId("past-live").addEventListener("click", () => this.leave());
    byId("past-before").addEventListener("click", () => this.step(-1));
    byId("past-after").addEventListener("click", () => this.step(1));
    byId("past-span").addEventListener("change", () => this.load());
    addEventListener("hashchange", () => this.follow());
    setInterval(() => !document.hidden && this.scale && this.load(), REFRESH);
    this.load().then(() => this.follow());
  }

  /** Request the scale; without a storage there is none, and no slider. */
  async load() {
    const now = Math.floor(Date.now() / 1000);
    const query = `from=${now - Number(byId("past-span").value)}&to=${now}`;
    try {
      const answer = await fetch(new URL(`api/v1/past/scale?${query}`, location.href));
      const scale = answer.ok ? await answer.json() : {};
      if (!scale.devices) return;
      this.scale = scale;
    } catch {
      return; // the next one may succeed
    }
    byId("past").hidden = false;
    this.slider.min = Math.floor(this.scale.from);
    this.slider.max = Math.ceil(this.scale.to);
    this.slider.step = Math.max(1, Math.round(this.scale.step));
    this.draw();
    this.tell();
  }

  follow() {
    const at = fromAddress();
    if (at === null) {
      if (this.asked !== null) this.leave();
    } else if (at !== this.asked) this.jump(at);
  }

  /** The slider moves: request a moment when it rests. */
  move(at) {
    clearTimeout(this.timer);
    this.asked = at;
    this.tell();
    this.timer = setTimeout(() => this.jump(at), PAUSE);
  }

  /** Go to the mark before or after the moment that is shown. */
  step(direction) {
    const here = this.asked ?? this.scale.to + 1;
    const times = this.scale.marks.map((mark) => Math.ceil(mark.time));
    const next = direction < 0 ? times.filter((time) => time < here).at(-1) : times.find((time) => time > here);
    if (next !== undefined) this.jump(next);
    else if (direction > 0) this.leave();
  }

  async jump(at) {
    clearTimeout(this.timer);
    this.asked = at;
    if (fromAddress() !== at) history.replaceState(null, "", `#at=${at}`);
    this.request?.abort();
    const request = (this.request = new AbortController());
    try {
      const answer = await fetch(new URL(`api/v1/past?at=${at}`, location.href), { signal: request.signal });
      if (!answer.ok) throw new Error((await answer.text()).trim());
      const told = await answer.json();
      if (told.error) throw new Error(told.error);
      this.show(told);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.problem = error.message;
      this.model = new Model();
      this.model.take({ full: true, gone: [], rows: {} });
    }
    this.onChange();
    this.tell();
  }

  show(answer) {
    this.problem = "";
    this.answer = answer;
    this.model = new Model();
    this.model.take({ full: true, gone: [], rows: answer.rows });
    this.model.past.load(answer.history);
    version -= 1; // no live chart has a negative version
    this.model.past.version = version;
  }

  leave() {
    clearTimeout(this.timer);
    this.request?.abort();
    this.model = this.answer = this.asked = null;
    this.problem = "";
    if (location.hash) history.replaceState(null, "", location.pathname + location.search);
    this.onChange();
    this.tell();
  }

  /** Say which moment is shown. */
  tell() {
    const live = this.asked === null;
    document.body.classList.toggle("past", !live);
    byId("past-live").disabled = live;
    if (this.scale) this.slider.value = live ? this.slider.max : this.asked;
    const words = live ? "now, live" : moment(this.asked);
    this.slider.setAttribute("aria-valuetext", words);
    this.words.set(words);
    for (const label of document.querySelectorAll(".plot .axis span:last-child")) label.textContent = live ? "now" : "then";
  }

  /** What the reader must not overlook, as a notice: its kind, title and words. */
  notices() {
    if (this.asked === null) return [];
    if (this.problem) return [["bad", "Nothing to show.", `Of ${moment(this.asked)}: ${this.problem}`]];
    if (!this.answer) return [];
    const shown = `This is the ledger as it was at ${moment(this.answer.time)}.`;
    if (this.answer.gap_until !== null) {
      const until = this.answer.gap_until ? `until ${moment(this.answer.gap_until)}` : "since then";
      return [["bad", "Not known.", `Nothing was stored ${until}. ${shown}`]];
    }
    return [["loud", "THE PAST", shown]];
  }

  draw() {
    const { devices, marks, from, to } = this.scale;
    const lanes = devices.map((device, lane) => this.lane(device, lane));
    const place = (time) => (((time - from) / (to - from)) * 360).toFixed(2);
    const height = Math.max(1, devices.length) * 24;
    const ticks = marks.map((mark) =>
      drawing(
        "path",
        { class: `mark ${BAD.includes(mark.kind) ? "mark-bad" : `mark-${mark.kind}`}`, d: `M${place(mark.time)} 0V${height}` },
        drawing("title", {}, `${moment(mark.time)}: ${about(mark)}`),
      ),
    );
    const picture = byId("past-scale");
    picture.setAttribute("viewBox", `0 0 360 ${height}`);
    picture.style.height = `${Math.min(160, 20 + height)}px`;
    arrange(picture, [...lanes, ...ticks]);
    byId("past-from").textContent = moment(from);
  }

  lane(device, lane) {
    const base = lane * 24 + 23;
    let outline = "";
    device.used.forEach((used, column) => {
      if (used !== null) outline += `M${column} ${base}V${(base - (used / device.total) * 22).toFixed(1)}H${column + 1}V${base}Z`;
    });
    return drawing("path", { class: "lane", d: outline || "M0 0" }, drawing("title", {}, `GPU ${device.gpu}: bytes in use`));
  }
}

function about(mark) {
  const who = mark.pid ? `pid ${mark.pid} ${mark.command} (${mark.owner})` : mark.owner;
  const words = { came: "came", went: "went", oom: "ran out of memory", lost: "no GPU data", back: "GPU data is back", "exporter-ended": "the exporter ended", "exporter-began": "the exporter began" };
  return `${who} ${words[mark.kind] ?? `became ${mark.kind}`}`.trim();
}

/** A notice of the past as an element. */
export const pastNotice = ([kind, title, words]) => element("p", { class: `notice ${kind}`, role: "status" }, element("strong", {}, title), ` ${words}`);
