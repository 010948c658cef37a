// Show what the reader must not overlook: a recording, no data, a lost connection, invisible holders.

import { arrange, byId, element } from "./elements.js";
import { span } from "./format.js";

const shown = new Map(); // its text to its element, so that a screen reader reads it once

function notice(kind, title, words) {
  const key = `${kind} ${title} ${words}`;
  if (!shown.has(key)) {
    shown.set(key, element("p", { class: `notice ${kind}` }, element("strong", {}, title), ` ${words}`));
  }
  return [key, shown.get(key)];
}

/** Show what is true now; `lost` is the time at which the connection was lost, 0 while it is not. */
export function showNotices(host, lost) {
  const found = [];
  if (lost) {
    const words = "The data below is old, and greyed out. The page keeps trying to reconnect.";
    found.push(notice("bad", "Connection lost.", words));
  }
  if (host.source === "replay") {
    const words = `This is ${host.recording ?? "unnamed"}, a recording. Nothing below is about this host.`;
    found.push(notice("loud", "RECORDING", words));
  }
  if (host.up === false && !lost) {
    if (host.failure) found.push(notice("bad", `No GPU data (${host.failure.reason}).`, host.failure.message));
    else if (!host.ready) found.push(notice("calm", "Starting.", "The first sample has not finished yet."));
    else found.push(notice("bad", "No GPU data.", ""));
  }
  if (host.up && host.host_pid_namespace === false) {
    const words =
      "The exporter is not in the host's PID namespace, so the holders of memory are not visible here. " +
      "Run it with --pid=host or hostPID: true; vramledger doctor says more.";
    found.push(notice("warn", "Blind.", words));
  }
  const keys = new Set(found.map(([key]) => key));
  for (const key of shown.keys()) if (!keys.has(key)) shown.delete(key);
  arrange(byId("notices"), found.map(([, made]) => made));
}

/** Say in the head of the page how fresh it is; the time beside it is not a live region. */
export function showStatus(status, age, host, lost) {
  const words = lost ? "Connection lost" : host.up ? "Live" : "No data";
  status.dataset.kind = lost ? "lost" : host.up ? "live" : "down";
  if (status.textContent !== words) status.textContent = words;
  age.textContent = lost ? `for ${span((Date.now() - lost) / 1000)}` : "";
}
