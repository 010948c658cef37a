"""Does anything grow, leak or drift? An exporter at 20 samples a second with changing holders.

Every few seconds a line of figures is written to a file, so that a run can be judged while it goes on, and
after it was broken off. The byte-seconds that the exporter counts are held against an integral of our own,
made when we change the bytes, with our clock.
"""

from __future__ import annotations

import http.client
import itertools
import json
import math
import random
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.lab.bench.scene import sleepers
from tests.lab.soak.table import Row
from tests.support.exporter import Exporter, Page, serving
from tests.support.host import model as simulated
from tests.support.host.driver import show
from tests.support.host.model import GIB, MIB, Gpu
from tests.support.host.programs import Fixed
from tests.support.standin.library import StandIn, build

DEVICES, HOLDERS = 4, 16
INTERVAL = 0.05
FLAGS = (f"--sample.interval={INTERVAL * 1000:.0f}ms", "--sample.timeout=300ms", "--owners.max=0")
LOOK = 5.0
"""Seconds between two lines of figures."""

CHURN = 0.2
"""Seconds between two changes of the holders, of one device after the other."""

SETTLED = 0.5
"""Share of a run that is its beginning: caches, pools, the live page's 15 minutes and the allocator's heap
fill up, ever more slowly, and no slope is judged there."""


@dataclass(frozen=True)
class Figures:
    """One measurement.

    Attributes:
        at: seconds since the beginning.
        exporter_rss: bytes; ``sampler_rss`` likewise.
        samples: readings of the driver so far, all samplers; None where nobody counts them.
        counted: byte-seconds that the exporter has counted, of all devices.
        integral: the same by our own integration.
        uncounted: device-seconds that it says it could not count.
        failures: samples that failed so far.
    """

    at: float
    exporter_rss: int
    sampler_rss: int
    exporter_files: int
    sampler_files: int
    exporter_threads: int
    sampler_threads: int
    exporter_cpu: float
    sampler_cpu: float
    series: int
    samples: int | None
    counted: float
    integral: float
    uncounted: float
    failures: float


class Process(NamedTuple):
    """A process at one moment: bytes, counts, and CPU seconds so far."""

    rss: int
    threads: int
    files: int
    cpu: float


def process(pid: int) -> Process:
    """Measure a process."""
    place = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    return Process(
        rss=int(status["VmRSS"].split()[0]) * 1024,
        threads=int(status["Threads"]),
        files=sum(1 for _ in (place / "fd").iterdir()),
        cpu=(int(fields[11]) + int(fields[12])) / 100,
    )


class Integral:
    """The byte-seconds of the holders of all devices, from the side that allocates the bytes."""

    def __init__(self) -> None:
        """Start with nothing held."""
        self._held = 0
        self._since = time.monotonic()
        self._sum = 0.0

    def change(self, held: int) -> None:
        """Record that from now on this many bytes are held."""
        self._sum, self._since, self._held = self.value, time.monotonic(), held

    @property
    def value(self) -> float:
        """Byte-seconds until now."""
        return self._sum + self._held * (time.monotonic() - self._since)


class Host(Protocol):
    """GPUs whose holders start, grow, shrink and end, and an integral of them besides the exporter's."""

    def change(self, turn: int) -> None:
        """Give one device, or one holder, other bytes: the next in turn."""

    def integral(self) -> float:
        """Return the byte-seconds that were held so far, on all devices."""

    def samples(self) -> int | None:
        """Return how many readings the driver has given to the exporter; None if they are not counted."""


class Pretended:
    """A stand-in driver, and real processes that start and end."""

    def __init__(self, standin: StandIn, pids: Sequence[int], seed: int) -> None:
        self.standin = standin
        self._random = random.Random(seed)  # noqa: S311 - a scenario, no secret
        self._pids = [pids[index::DEVICES] for index in range(DEVICES)]
        gpus = [Gpu(index, unowned=lambda _: 0) for index in range(DEVICES)]
        self._host = simulated.Host(gpus, [], self._random)
        self._integral = Integral()
        self._newborn: list[subprocess.Popen[bytes]] = []

    def integral(self) -> float:
        """Return the byte-seconds, by the moments at which bytes were set."""
        return self._integral.value

    def samples(self) -> int:
        """Return how often the first device's memory was read."""
        return self.standin.calls("nvmlDeviceGetMemoryInfo_v2", 0)

    def change(self, turn: int) -> None:
        """Give one device other holders; some are processes that start now and end a little later."""
        draw, index = self._random, turn % DEVICES
        listed = {
            pid: draw.randrange(1, 8 * GIB // MIB) * MIB for pid in self._pids[index] if draw.random() < 0.9
        }
        if draw.random() < 0.3:
            self._newborn.append(subprocess.Popen(["sleep", "60"]))
        if len(self._newborn) > 4:
            old = self._newborn.pop(0)
            old.kill()
            old.wait()
        listed |= {
            child.pid: draw.randrange(1, GIB // MIB) * MIB for child in self._newborn if draw.random() < 0.5
        }
        busy = draw.sample(sorted(listed), min(3, len(listed)))
        gpu = self._host.gpus[index]
        temperature, power = float(draw.randrange(30, 80)), draw.randrange(70_000, 700_000) / 1000
        gpu.sensors = lambda _: {"device_temperature_celsius": temperature, "device_power_watts": power}
        self._host.processes = [
            *(each for each in self._host.processes if index not in each.places),
            *(
                simulated.Process(pid, {index: Fixed(size, draw.random() * (pid in busy))})
                for pid, size in listed.items()
            ),
        ]
        reading = self._host.reading(float(turn))
        show(reading, self.standin, live=True)
        self._integral.change(sum(each.memory.used for each in reading.devices if each.memory is not None))
        if draw.random() < 0.01:
            self.standin.xid(draw.choice((13, 31, 43)), index)

    def end(self) -> None:
        """End the processes that were started."""
        for child in self._newborn:
            child.kill()
            child.wait()


def _look(exporter: Exporter, page: Page, host: Host, begun: float, start: tuple[float, float]) -> Figures:
    ours, theirs = process(exporter.process.pid), process(exporter.sampler.pid)
    counted, integral = _sums(page, host)
    return Figures(
        at=round(time.monotonic() - begun, 3),
        exporter_rss=ours.rss,
        sampler_rss=theirs.rss,
        exporter_files=ours.files,
        sampler_files=theirs.files,
        exporter_threads=ours.threads,
        sampler_threads=theirs.threads,
        exporter_cpu=ours.cpu,
        sampler_cpu=theirs.cpu,
        series=len(page.samples),
        samples=host.samples(),
        counted=counted - start[0],
        integral=integral - start[1],
        uncounted=sum(page.values("owner_uncounted_seconds_total").values()),
        failures=sum(page.values("sample_failures_total").values()),
    )


def _sums(page: Page, host: Host) -> tuple[float, float]:
    """Return the byte-seconds that the exporter has counted, and ours."""
    counted = sum(page.values("owner_memory_byte_seconds_total").values())
    return counted, host.integral()


def _view(port: int) -> None:
    """Read the live page until its stream ends."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/api/v1/events", headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    with suppress(http.client.IncompleteRead):  # an exporter that is killed does not end it in order
        while answer.read1(65536):
            pass


def endure(directory: Path, out: Path, *, seconds: float, seed: int) -> list[Figures]:
    """Run an exporter over a stand-in driver for this time; write the figures to ``out`` at once."""
    with ExitStack() as stack:
        pids = stack.enter_context(sleepers(DEVICES * HOLDERS))
        standin = stack.enter_context(StandIn(directory, build(directory), devices=DEVICES))
        host = Pretended(standin, pids, seed)
        stack.callback(host.end)
        for index in range(DEVICES):
            host.change(index)
        control = directory / "control"  # at its usual place others would release our GPUs
        exporter = stack.enter_context(serving(*FLAGS, f"--control.socket={control}", driver=standin.env()))
        return watch(exporter, host, out, seconds=seconds)


def watch(exporter: Exporter, host: Host, out: Path, *, seconds: float) -> list[Figures]:
    """Scrape an exporter while its host changes, and return the figures, also written to ``out``."""
    found: list[Figures] = []
    exporter.until(lambda page: page.up, "data")
    threading.Thread(target=_view, args=(exporter.port,), daemon=True).start()
    begun = due = look = time.monotonic()
    start: tuple[float, float] | None = None
    turn = 0
    with out.open("w", encoding="utf-8") as lines:
        while (now := time.monotonic()) - begun <= seconds:
            host.change(turn)
            turn += 1
            if now >= look:
                look += LOOK
                page = exporter.scrape()
                start = start or _sums(page, host)
                figures = _look(exporter, page, host, begun, start)
                found.append(figures)
                print(json.dumps(asdict(figures)), file=lines, flush=True)
            elif turn % 5 == 0:
                exporter.get("/metrics")
            due = max(due + CHURN, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    return found


def read(path: Path) -> list[Figures]:
    """Read what a run has written so far."""
    return [Figures(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


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
    if not size:
        message = f"{len(times)} figures are too few to judge growth: run it for 3 minutes at least"
        raise ValueError(message)
    x = [sum(times[i * size : (i + 1) * size]) / size for i in range(blocks)]
    y = [sum(values[i * size : (i + 1) * size]) / size for i in range(blocks)]
    mean_x, mean_y = sum(x) / blocks, sum(y) / blocks
    spread = sum((each - mean_x) ** 2 for each in x)
    gradient = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - gradient * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return Slope(gradient * 3600, math.sqrt(rest / (blocks - 2) / spread) * 3600)


def judge(found: Sequence[Figures]) -> Iterator[Row]:
    """Yield the rows of the table.

    What is below 64 KiB an hour (1.5 MiB a day at 20 times the usual pace) counts as none.
    """
    last = found[-1]
    settled = [each for each in found if each.at >= last.at * SETTLED]
    times = [each.at for each in settled]
    samples = "" if last.samples is None else f", {last.samples:,} samples"
    yield Row("length", f"{last.at / 60:.0f} min{samples}", None)
    for who in ("exporter", "sampler"):
        sizes = [getattr(each, f"{who}_rss") for each in settled]
        line = slope(times, sizes)
        text = f"{line.hourly / 1024:+.0f} ± {line.error / 1024:.0f} KiB/h (max {max(sizes) / MIB:.1f} MiB)"
        yield Row(f"RSS of the {who}", text, line.flat or line.hourly < 64 * 1024)
        for what in ("files", "threads"):
            counts = [getattr(each, f"{who}_{what}") for each in settled]
            half = len(counts) // 2
            text = f"{min(counts)} to {max(counts)}"
            yield Row(f"{what} of the {who}", text, max(counts[half:]) <= max(counts[:half]) + 1)
        spent = (getattr(last, f"{who}_cpu") - getattr(settled[0], f"{who}_cpu")) / (last.at - settled[0].at)
        yield Row(f"CPU of the {who}", f"{spent * 1000:.0f} ms/s", None)
    series = [each.series for each in settled]
    half = len(series) // 2
    yield Row("series", f"{min(series)} to {max(series)}", max(series[half:]) <= max(series[:half]) * 1.05)
    drift = last.counted / last.integral - 1
    yield Row("byte-seconds against our own integral", f"{drift:+.2e}", abs(drift) < 1e-3)
    backwards = sum(b.counted < a.counted for a, b in itertools.pairwise(found))
    yield Row("byte-seconds that went back", str(backwards), backwards == 0)
    yield Row("failed samples", f"{last.failures:.0f}", last.failures == 0)
    yield Row("seconds not counted", f"{last.uncounted:.1f}", None)
