// Write figures for people. An unknown figure is a dash, never a zero.

export const UNKNOWN = "–";

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes with three or four digits: 40.5 GiB. */
export function bytes(count) {
  if (count === null || count === undefined) return UNKNOWN;
  let size = Math.abs(count);
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  if (unit === 0) return `${count} B`;
  return `${count < 0 ? "−" : ""}${size.toFixed(size < 9.995 ? 2 : size < 99.95 ? 1 : 0)} ${UNITS[unit]}`;
}

/** A change of bytes with its sign. */
export const change = (count) => (count > 0 ? `+${bytes(count)}` : bytes(count));

/** A span as its two largest units: 3d 4h, 12m 5s. */
export function span(seconds) {
  let left = Math.max(0, Math.floor(seconds));
  const parts = [];
  for (const [unit, size] of [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]]) {
    const count = Math.floor(left / size);
    left -= count * size;
    if (count || (unit === "s" && !parts.length)) parts.push(`${count}${unit}`);
    else if (parts.length) break;
    if (parts.length === 2) break;
  }
  return parts.join(" ");
}

/** A share in whole percent; only exactly nothing is 0 %. */
export function percent(share) {
  if (share === null || share === undefined) return UNKNOWN;
  if (share > 0 && share < 0.01) return "<1%";
  return `${Math.round(share * 100)}%`;
}

/** A moment of the host's clock, in the reader's time zone. */
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

/** A moment with its day. */
export const moment = (seconds) => new Date(seconds * 1000).toLocaleString([], { hour12: false });
