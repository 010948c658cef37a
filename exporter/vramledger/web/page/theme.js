// Before the first paint, set the theme that the reader chose here; without a choice the system's applies.
(() => {
  "use strict";
  let chosen = null;
  try {
    chosen = localStorage.getItem("vramledger-theme");
  } catch {
    // Storage is forbidden here; the choice then lasts as long as the page.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
