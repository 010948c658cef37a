// The page: events arrive, the model stores them, and each part shows what has changed.

import { arrange, attribute, byId, element } from "./elements.js";
import { Devices } from "./devices.js";
import { clock } from "./format.js";
import { Holders } from "./holders.js";
import { Model } from "./model.js";
import { pastNotice, Travel } from "./past.js";
import { showNotices, showStatus } from "./notices.js";
import { follow } from "./stream.js";
import { Summary } from "./summary.js";

const model = new Model();
const holders = new Holders(() => draw(true));
const summary = new Summary((state) => holders.choose(state));
const devices = new Devices();
const age = element("p", { class: "age faint" });
byId("status").after(age);
let lost = 0;
let asked = false;

const travel = new Travel(() => {
  if (!travel.model) for (const key of model.rows.keys()) model.changed.add(key);
  if (!travel.model) model.past.version += 1;
  draw(true);
});

function draw(forced) {
  const begun = performance.now();
  arrange(byId("past-notices"), travel.notices().map(pastNotice));
  if (travel.model) drawLedger(travel.model, true);
  showNotices(model.host, lost);
  showStatus(byId("status"), age, model.host, lost);
  if (!lost && model.host.time) age.textContent = `${model.host.up ? "sample of" : "last attempt at"} ${clock(model.host.time)}`;
  document.body.classList.toggle("stale", Boolean(lost) && !travel.model);
  if (!travel.model && model.devices) drawLedger(model, forced);
  performance.measure("draw", { start: begun, end: performance.now() });
  if (performance.getEntriesByType("measure").length > 100) performance.clearMeasures();
}

function drawLedger(shown, forced) {
  if (!shown.devices) return;
  summary.show(shown, holders.states);
  devices.show(shown);
  holders.show(shown, forced);
}

/** Request once the minutes before the page was opened; the stream runs at the same time. */
async function requestThePast() {
  try {
    // Do not use the document's own address: it may contain a login, and fetch() refuses such an address.
    const answer = await fetch(new URL("api/v1/history", location.href));
    if (answer.ok) model.past.load(await answer.json());
    draw(false);
  } catch {
    asked = false; // the next full event requests it again
  }
}

follow(
  "api/v1/events",
  (event) => {
    lost = 0;
    model.take(event);
    if (!travel.model) draw(event.full);
    else showStatus(byId("status"), age, model.host, lost);
    if (event.full && (!asked || model.past.devices.size)) {
      asked = true;
      requestThePast();
    }
  },
  (since) => {
    lost = since;
    draw(false);
  },
);

setInterval(() => lost && showStatus(byId("status"), age, model.host, lost), 1000);

const wish = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ?? (wish.matches ? "dark" : "light")) === "dark";
const tellTheme = () => attribute(byId("theme"), "aria-pressed", dark());
byId("theme").addEventListener("click", () => {
  const chosen = dark() ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem("vramledger-theme", chosen);
  } catch {
    // It lasts as long as the page.
  }
  tellTheme();
});
wish.addEventListener("change", tellTheme);
tellTheme();
