"""Hours in minutes: an exporter plays a recording of a day as fast as it can be read.

The recording is drawn here, and what must come of it is worked out beside it, from what was drawn and not
from what the exporter's own code makes of it: byte-seconds by owner and state, who is idle, how much was
free.
A figure in the recording counts its readings, so each page can be held against the very reading that it
shows. Scrapes and a viewer of the live page go on all the while.
"""

from __future__ import annotations

import gzip
import http.client
import json
import math
import random
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from tests.lab.soak.table import Row
from tests.support.exporter import Exporter, Page, no_driver, serving
from tests.support.host.model import GIB, MIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from vramledger.model.reading import HardwareValue, Owner, Reading, encode
from vramledger.sampling.replay import encode_header

DEVICES, HOLDERS = 2, 8
STEP = 2.0
"""Recorded seconds from one reading to the next."""

IDLE_AFTER = 600.0
TAIL = 1800.0
"""Recorded seconds behind the end that is judged: a pass that is over takes what it has counted with it."""

GROWTH_FROM = 3600.0
"""Recorded seconds from which growth is judged: before, the 15 minutes of the page and the peaks fill up."""

HISTORY_STEP, HISTORY_STEPS = 5.0, 180

_OWNERS = tuple(f"job{number}.service" for number in range(6))
# No more than the exporter remembers once they hold nothing: what one has cost is never forgotten.

Key = tuple[str, str, str]
"""UUID, owner, state."""


class Slope(NamedTuple):
    """A straight line through figures: units an hour, and its standard error."""

    hourly: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether it is zero within three of its standard errors."""
        return abs(self.hourly) <= 3 * self.error


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit a line by least squares.

    The error is that of ten blocks' means about the line: memory moves in steps that last, so neighbouring
    figures say nearly the same, and the formula for independent ones would make noise look like growth.
    """
    blocks = 10
    size = len(times) // blocks
    x = [sum(times[i * size : (i + 1) * size]) / size for i in range(blocks)]
    y = [sum(values[i * size : (i + 1) * size]) / size for i in range(blocks)]
    mean_x, mean_y = sum(x) / blocks, sum(y) / blocks
    spread = sum((each - mean_x) ** 2 for each in x)
    gradient = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - gradient * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(gradient * 3600, math.sqrt(rest / (blocks - 2) / spread) * 3600)


@dataclass
class _Holder:
    """A process; ``quiet`` (last sign of work) and ``until`` (next change) are numbers of readings."""

    process: Process
    program: Fixed
    quiet: int
    until: int


@dataclass
class Truth:
    """The expected results of a recording, by the number of the reading."""

    spent: dict[Key, array[float]] = field(default_factory=dict)  # byte-seconds until that reading
    idle: list[array[int]] = field(default_factory=list)  # twice each holder's pid, and one when it is idle
    free: dict[str, array[int]] = field(default_factory=dict)  # bytes by UUID


class _Day:
    """Holders that start, work, rest, grow and end, reading by reading."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self._pid = 1000
        self._spent: dict[Key, int] = {}
        gpus = [Gpu(index, sensors=_numbered) for index in range(DEVICES)]
        self._host = Host(gpus, [], self._random, STEP)
        self._devices = [[self._come(index, 0) for _ in range(HOLDERS)] for index in range(DEVICES)]
        self.truth = Truth(free={gpu.uuid(0): array("q") for gpu in gpus})

    def _come(self, index: int, number: int) -> _Holder:
        draw = self._random
        self._pid += 1
        unit = draw.choice(_OWNERS)
        program = Fixed(draw.randrange(100, 8 * GIB // MIB) * MIB, 0.5 * (draw.random() < 0.5))
        process = Process(
            self._pid, {index: program}, begin=number * STEP, owner=Owner("unit", unit, unit=unit)
        )
        return _Holder(process, program, quiet=number, until=number)

    def _live(self, holder: _Holder, number: int) -> None:
        """Change its work at times, and its bytes seldom; both are signs of work."""
        draw, program = self._random, holder.program
        if number >= holder.until:
            program.work = 0.0 if program.work else 0.5
            holder.until = number + int(draw.expovariate(1 / (120 if program.work else 1200)) / STEP) + 1
        if draw.random() < 0.0005:
            program.memory = draw.randrange(100, 8 * GIB // MIB) * MIB
            holder.quiet = number
        if program.work:
            holder.quiet = number

    def reading(self, number: int) -> Reading:
        """Draw the next reading, and record its expected results."""
        draw, now = self._random, number * STEP
        for key, column in self.truth.spent.items():
            column.append(self._spent[key])
        states = array("q")
        for index, (gpu, holders) in enumerate(zip(self._host.gpus, self._devices, strict=True)):
            if draw.random() < 0.01:
                holders[draw.randrange(HOLDERS)] = self._come(index, number)
            held = gpu.unowned(now)
            for holder in holders:
                self._live(holder, number)
                process, memory = holder.process, holder.program.memory
                idle = (number - holder.quiet) * STEP >= IDLE_AFTER
                states.append(2 * process.pid + idle)
                owner = process.owner.name if process.owner else ""
                self._spend((gpu.uuid(now), owner, "idle" if idle else "active"), memory, number)
                held += memory
            self.truth.free[gpu.uuid(now)].append(gpu.total - gpu.reserved - held)
        self.truth.idle.append(states)
        self._host.processes = [holder.process for holders in self._devices for holder in holders]
        return self._host.reading(now)

    def _spend(self, key: Key, memory: int, number: int) -> None:
        """Charge what a reading saw until the next one."""
        if key not in self._spent:
            self._spent[key] = 0
            self.truth.spent[key] = array("d", bytes(8 * (number + 1)))
        self._spent[key] += memory * int(STEP)


def _numbered(now: float) -> Mapping[str, HardwareValue]:
    """Use the number of the reading as the figure of the energy."""
    return {"device_energy_joules_total": now / STEP}


def record(path: Path, *, hours: float, seed: int) -> Truth:
    """Write a recording of these hours and a tail."""
    day = _Day(seed)
    with gzip.open(path, "wb", compresslevel=1) as out:
        out.write(encode_header("a day of holders that come, work, rest and go", IDLE_AFTER))
        for number in range(int((hours * 3600 + TAIL) / STEP)):
            out.write(encode(day.reading(number)))
    return day.truth


class Look(NamedTuple):
    """One measurement; ``at`` is in recorded seconds."""

    at: float
    rss: int
    files: int
    threads: int
    series: int


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    looks: Sequence[Look]  # the exporter itself, again and again
    minutes: float  # how long it took
    drift: float = 0.0  # the largest relative error of an owner's byte-seconds in a state, over all pages
    back: int = 0  # counters that went back
    judged: int = 0  # holders whose state was looked at; ``misjudged`` were shown another one
    misjudged: int = 0
    steps: int = 0  # steps of the 15 minutes that were looked at, all devices; ``wrong`` were another's
    wrong: int = 0
    events: int = 0  # pieces of the live page's stream that its viewer got

    def rows(self) -> Iterator[Row]:
        """Yield the rows of the table; growth is judged over the second half."""
        last = self.looks[-1].at
        settled = [look for look in self.looks if look.at >= last / 2]
        readings = last / STEP
        yield Row("length", f"{last / 3600:.1f} h in {self.minutes:.1f} min: {readings:,.0f} readings", None)
        yield Row("pages looked at, events seen", f"{len(self.looks):,}, {self.events:,}", self.events > 0)
        if len(settled) >= 10 and settled[0].at >= GROWTH_FROM:
            line = slope([look.at for look in settled], [look.rss for look in settled])
            text = f"{line.hourly * 24 / 1024:+.0f} ± {line.error * 24 / 1024:.0f} KiB a recorded day"
            most = max(look.rss for look in settled)
            good = line.flat or line.hourly * 24 < 256 * 1024
            yield Row("RSS of the exporter", f"{text} (max {most / MIB:.1f} MiB)", good)
        for what in ("files", "threads", "series"):
            counts = [int(getattr(look, what)) for look in settled]
            half = math.ceil(len(counts) / 2)
            good = max(counts[half:], default=0) <= max(counts[:half]) * 1.05 + 1
            yield Row(what, f"{min(counts)} to {max(counts)}", good)
        yield Row("byte-seconds by owner and state, largest error", f"{self.drift:.1e}", self.drift < 1e-9)
        yield Row("counters that went back", str(self.back), self.back == 0)
        text = f"{self.misjudged:,} of {self.judged:,}"
        yield Row("holders idle or active that should not be", text, self.judged > 0 and not self.misjudged)
        text = f"{self.wrong:,} of {self.steps:,}"
        yield Row("steps of the 15 minutes that were wrong", text, self.steps > 0 and not self.wrong)


def _judge(page: Page, truth: Truth, found: Result, before: Page | None) -> Result:
    """Compare a page with the reading that it shows."""
    number = _number(page)
    drift = found.drift
    for (uuid, owner, state), column in truth.spent.items():
        counted = page.value("owner_memory_byte_seconds_total", uuid=uuid, owner=owner, state=state) or 0.0
        expected = column[number] if number < len(column) else 0.0
        drift = max(drift, abs(counted - expected) / max(expected, 1.0))
    back = found.back
    if before is not None:
        counters = {key: value for key, value in page.samples.items() if key[0].endswith("_total")}
        back += sum(value < before.samples.get(key, value) for key, value in counters.items())
    shown = page.values("process_state_since_timestamp_seconds")
    states = {int(dict(labels)["pid"]): dict(labels)["state"] for labels in shown}
    expected_states = {word // 2: "idle" if word % 2 else "active" for word in truth.idle[number]}
    return replace(
        found,
        drift=drift,
        back=back,
        judged=found.judged + len(expected_states),
        misjudged=found.misjudged + len(states.items() ^ expected_states.items()),
    )


def _number(page: Page) -> int:
    return int(max(page.values("device_energy_joules_total").values()))


def _judge_history(text: str, page: Page, truth: Truth, found: Result) -> Result:
    """Compare the 15 minutes with the recording: in each step the reading with the least free counts.

    The newest step is left out, which is not over yet.
    """
    begun = page.time - _number(page) * STEP
    least: dict[str, dict[int, int]] = {}
    for uuid, column in truth.free.items():
        lowest = least[uuid] = {}
        for number, free in enumerate(column):
            step = int((begun + number * STEP) // HISTORY_STEP)
            lowest[step] = min(free, lowest.get(step, free))
    document = json.loads(text)
    times = [int(at // HISTORY_STEP) for at in document["times"]][:-1]
    steps = wrong = 0
    for device in document["devices"]:
        shown = device["memory"]["free"][:-1]
        steps += HISTORY_STEPS
        wrong += abs(HISTORY_STEPS - len(times))
        wrong += sum(least[device["uuid"]][step] != free for step, free in zip(times, shown, strict=True))
    return replace(found, steps=steps, wrong=wrong)


class _Viewer(threading.Thread):
    """A viewer of the live page."""

    def __init__(self, exporter: Exporter) -> None:
        super().__init__(daemon=True)
        self.events = 0
        self._port = exporter.port

    def run(self) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port)) as connection:
            connection.request("GET", "/api/v1/events", headers={"Accept-Encoding": "gzip"})
            with connection.getresponse() as answer:
                while answer.read1(65536):
                    self.events += 1


def play(recording: Path, truth: Truth, *, hours: float, speed: float, pause: float = 0.5) -> Result:
    """Play the recording at that speed; measure every ``pause`` seconds."""
    flags = (f"--source=replay:{recording}", f"--replay.speed={speed}", "--owners.max=0")
    with serving(*flags, driver=no_driver(recording.parent / "driver")) as exporter:
        page = exporter.until(lambda page: page.up, "data")
        viewer = _Viewer(exporter)
        viewer.start()
        begun = time.monotonic()
        looks: list[Look] = []
        found, before = Result(looks, 0.0), None
        while True:
            found, before = _judge(page, truth, found, before), page
            ours = exporter.process
            figures = (ours.memory_info().rss, ours.num_fds(), ours.num_threads(), len(page.samples))
            looks.append(Look((at := _number(page) * STEP), *figures))
            if at >= hours * 3600:
                break
            time.sleep(pause)
            page = exporter.scrape()
            if _number(page) < _number(before):
                message = f"{recording} was over before its end was seen: play it at a lower speed"
                raise RuntimeError(message)
        _, text = exporter.get("/api/v1/history")
        found = _judge_history(text, page, truth, found)
        minutes = (time.monotonic() - begun) / 60
    viewer.join(10)  # the stream has ended with the exporter
    return replace(found, minutes=minutes, events=viewer.events)


def run(directory: Path, *, hours: float, speed: float, seed: int) -> Result:
    """Write a recording of these hours, and play it at that speed."""
    recording = directory / "day.jsonl.gz"
    truth = record(recording, hours=hours, seed=seed)
    return play(recording, truth, hours=hours, speed=speed)
