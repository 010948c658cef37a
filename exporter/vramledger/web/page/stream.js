// The stream of events: it is open while the page is visible, and is opened again when the connection is lost.

const SILENCE = 12000; // ms without an event: the exporter sends one every 5 s at least
const PAUSES = [500, 1000, 2000, 5000]; // ms before the next try

// Characters that are invisible, or turn, join, hide or cover the text beside them: those of vramledger_agent/printable.py.
const TRICKS = /(?! )[\p{C}\p{Z}\p{DI}\u2800\u{16fe4}\u{1d159}]|(?<=[\p{Mn}\p{Me}]{2})[\p{Mn}\p{Me}]/gu;
const harmless = (_, value) => (typeof value === "string" ? value.replace(TRICKS, "\ufffd") : value);

/** Call `onEvent` with each event, `onLost(since)` when the connection is lost; Date.now() of the loss. */
export function follow(path, onEvent, onLost) {
  let stream = null;
  let watch = 0;
  let again = 0;
  let tries = 0;
  let lost = 0;

  function close() {
    clearTimeout(watch);
    clearTimeout(again);
    if (stream) stream.close();
    stream = null;
  }

  function fail() {
    close();
    lost = lost || Date.now();
    onLost(lost);
    again = setTimeout(open, PAUSES[Math.min(tries, PAUSES.length - 1)]);
    tries += 1;
  }

  function open() {
    close();
    stream = new EventSource(path);
    watch = setTimeout(fail, SILENCE);
    stream.onerror = fail;
    stream.onmessage = (message) => {
      clearTimeout(watch);
      watch = setTimeout(fail, SILENCE);
      tries = 0;
      lost = 0;
      onEvent(JSON.parse(message.data, harmless));
    };
  }

  // A browser has six connections to a host: a hidden page closes its connection.
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) close();
    else if (!stream) open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => event.persisted && open());
  addEventListener("online", () => lost && open());
  open();
}
