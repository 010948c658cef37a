"""What does each step cost by itself, from the driver's answer to the page?"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import cycle
from pathlib import Path

import psutil

from tests.lab.bench.sample import readings
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import SamplingConfig
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.reading import decode, encode
from vramledger.readers.hosts.host import Host
from vramledger.readers.nvml.driver import Driver

_COLLECTORS = SamplingConfig().collectors


def _median(step: Callable[[], object], times: int = 30) -> float:
    took = []
    for _ in range(times):
        begun = time.perf_counter()
        step()
        took.append(time.perf_counter() - begun)
    return statistics.median(took)


def measure(scene: Scene) -> Iterator[Row]:
    """Yield the medians, in the order of a sample's steps."""
    at = scene.name
    yield Row(at, "reading one GPU, beyond the driver's time", _device(scene), unit="s")
    pid = os.getpid()
    host = Host(Path("/proc"), Path("/"))
    row = _median(partial(host.row, pid), 1000)
    known = psutil.Process(pid)
    yield Row(at, "a process' row of /proc", row, _median(partial(_psutil, known), 300), "s", None, "psutil")
    found = readings(scene, 10)
    yield Row(at, "reading to JSON", _median(partial(encode, found[0])), unit="s")
    lines = [encode(reading) for reading in found]
    yield Row(at, "JSON", len(lines[0]), unit="B")
    yield Row(at, "JSON to reading", _median(partial(decode, lines[0])), unit="s")
    tracker = HoldingTracker(idle_after=600.0)
    turn = cycle(found)
    yield Row(at, "reading to snapshot", _median(lambda: tracker.update(next(turn))), unit="s")
    snapshots = cycle([tracker.update(reading) for reading in found])
    text = ScrapeRequest(_COLLECTORS)
    modern = ScrapeRequest(_COLLECTORS, openmetrics=True)
    packed = ScrapeRequest(_COLLECTORS, openmetrics=True, compressed=True)
    for what, want in (("text", text), ("OpenMetrics", modern), ("OpenMetrics, gzip", packed)):
        first = _median(lambda want=want: _exposition().render(next(snapshots), want), 10)  # type: ignore[misc]
        yield Row(at, f"first page, {what}", first, unit="s")
        kept = _exposition()
        kept.render(next(snapshots), want)
        again = _median(lambda want=want, kept=kept: kept.render(next(snapshots), want))  # type: ignore[misc]
        yield Row(at, f"next page, {what}", again, unit="s")


def _exposition() -> Exposition:
    return Exposition(0, os.getpid)


def _psutil(process: psutil.Process) -> None:
    with process.oneshot():
        process.status()
        process.ppid()
        process.create_time()
        process.num_threads()
        process.terminal()


def _device(scene: Scene) -> float:
    """Return the time for a GPU whose driver answers immediately."""
    scene.standin.latencies({})
    try:
        with scene.standin.in_this_process():
            driver = Driver.open()
            with closing(driver):
                reader = driver.readers(_COLLECTORS)[0]
                return _median(lambda: reader.read(time.time(), time.monotonic()))
    finally:
        scene.standin.latencies()
