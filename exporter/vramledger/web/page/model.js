// Store what is known: the rows of the stream, and each device's last 15 minutes.

export const STATES = ["active", "idle", "stopped", "orphaned", "zombie", "stuck", "dead", "unknown"];
export const PARTS = [...STATES, "unattributed", "operating_system", "driver_reserved", "free"];

/** Bytes of one part of a ledger; null when the driver does not report it. */
export function part(memory, name) {
  return name in memory.states ? memory.states[name] : memory[name];
}

/** Whether unattributed bytes are so few that the driver's own work explains them: they have no loud colour. */
export const slight = (name, size, total) => name === "unattributed" && size < total / 200;

export class Model {
  constructor() {
    this.rows = new Map();
    this.changed = new Set();
    this.past = new Past();
  }

  /** Store an event; `changed` then has the keys of the rows that are new, changed or gone. */
  take(event) {
    this.changed = new Set(event.gone);
    if (event.full) {
      for (const key of this.rows.keys()) this.changed.add(key);
      this.rows.clear();
    }
    for (const key of event.gone) this.rows.delete(key);
    for (const [key, row] of Object.entries(event.rows)) {
      this.rows.set(key, row);
      this.changed.add(key);
    }
    this.devices = [];
    this.holders = [];
    for (const [key, row] of this.rows) {
      if ("holdings" in row || key === "") continue;
      if ("pid" in row) this.holders.push([key, row]);
      else this.devices.push(row);
    }
    this.devices.sort((one, other) => one.gpu - other.gpu || one.uuid.localeCompare(other.uuid));
    if (this.host.up && this.host.time !== null) this.past.note(this.host.time, this.devices);
  }

  get host() {
    return this.rows.get("") ?? {};
  }
}

/** The last 15 minutes of every device: first from the exporter, then updated from the stream. */
export class Past {
  constructor() {
    this.step = 5;
    this.length = 180;
    this.newest = null;
    this.devices = new Map(); // UUID to steps: number of the step to {part: bytes}
    this.version = 0;
  }

  /** Store /api/v1/history; what has arrived on the stream since then stays. */
  load(told) {
    this.step = told.step;
    for (const { uuid, memory } of told.devices) {
      const steps = this.devices.get(uuid) ?? new Map();
      told.times.forEach((time, place) => {
        const number = Math.round(time / told.step);
        if (memory.free[place] === null || steps.has(number)) return;
        steps.set(number, Object.fromEntries(PARTS.map((name) => [name, memory[name][place] ?? 0])));
      });
      this.devices.set(uuid, steps);
    }
    this.version += 1;
  }

  /** Keep the sample with the most memory in use in each step, as the exporter does. */
  note(time, devices) {
    const number = Math.floor(time / this.step);
    if (this.newest !== null && number < this.newest) this.devices.clear(); // a recording started again
    if (number !== this.newest) this.version += 1;
    this.newest = number;
    for (const { uuid, memory } of devices) {
      if (!memory) continue;
      const steps = this.devices.get(uuid) ?? new Map();
      const before = steps.get(number);
      if (!before || memory.free < before.free) {
        steps.set(number, Object.fromEntries(PARTS.map((name) => [name, part(memory, name) ?? 0])));
      }
      for (const old of steps.keys()) if (old < number - this.length) steps.delete(old);
      this.devices.set(uuid, steps);
    }
  }
}
