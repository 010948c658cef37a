"""Faults around a running exporter: each begins, is observed, ends, and must then be over at once.

Real programs: an exporter, its sampler, holders. On every page, during a fault and after it, books balance,
a device that is down has no data, counters do not go back. After its end the page must be right again; how
long that took is what the table says.
"""

from __future__ import annotations

import mmap
import random
import resource
import struct
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.lab.soak.table import Row
from tests.support.exporter import Exporter, Page, check, serving
from tests.support.host import model as simulated
from tests.support.host.driver import show
from tests.support.host.model import GIB, MIB, Gpu, Process
from tests.support.host.programs import Fixed
from tests.support.players.stage import Stage
from tests.support.standin.layout import FUNCTIONS
from tests.support.standin.library import Code, StandIn, build, compiler

INTERVAL = 0.2
PATIENCE = 40.0
"""Seconds after the end of a fault in which the page must be right again."""

DRIVER = tuple(name for name in FUNCTIONS if name.startswith(("nvmlDevice", "nvmlSystem", "nvmlEvent")))
_UNREACHABLE = (OSError, urllib.error.URLError, ValueError)
_CLOCK = Path(__file__).with_name("clock.c")


class BrokenPromiseError(AssertionError):
    """A page that is not true, or an exporter that does not recover."""


class Trial(NamedTuple):
    """One kind of fault: ``begin`` starts it and returns what ends it, ``lasts`` is for how many seconds.

    ``after`` is what the exporter needs beyond a sampling period by design, in seconds.
    """

    name: str
    begin: Callable[[Host], Callable[[], None]]
    lasts: tuple[float, float]
    after: float = 0.0


@dataclass
class Host:
    """A running exporter, and everything around it that can break.

    Attributes:
        simulated: the GPUs, and who holds what on them.
        standin: the driver that shows them.
    """

    simulated: simulated.Host
    standin: StandIn
    exporter: Exporter
    draw: random.Random
    clock: mmap.mmap
    devices: Path
    counters: dict[tuple[str, object], float] = field(default_factory=dict)
    pages: int = 0
    unreachable: int = 0
    begun: float = field(default_factory=time.monotonic)

    def show(self) -> None:
        """Let the driver say what is so now."""
        show(self.simulated.reading(time.monotonic() - self.begun), self.standin, live=True)

    def look(self) -> Page | None:
        """Return a page that meets the promises for every page, None when there is none."""
        try:
            status, text = self.exporter.get("/metrics")
        except _UNREACHABLE:
            self.unreachable += 1
            return None
        if status != 200:
            self.unreachable += 1
            return None
        page = Page(text)
        check(page)
        self.pages += 1
        for key, value in page.samples.items():
            if key[0].startswith("vramledger_") and key[0].endswith("_total") and "_process_" not in key[0]:
                if value < self.counters.get(key, 0.0):
                    message = f"{key} went back from {self.counters[key]} to {value}"
                    raise BrokenPromiseError(message)
                self.counters[key] = value
        return page

    def well(self, page: Page | None) -> bool:
        """Tell whether a page says that everything works, with the driver's current figures."""
        if page is None or not page.up:
            return False
        truth = {
            (gpu, process.pid): program.use(0.0).memory
            for process in self.simulated.processes
            for gpu, program in process.places.items()
        }
        shown = {
            (int(labels["gpu"]), int(labels["pid"])): int(value)
            for key, value in page.values("process_memory_bytes").items()
            for labels in (dict(key),)
            if labels["pid"] != "other"
        }
        healthy = all(value == 1 for value in page.values("collector_success").values())
        return healthy and shown == truth


# --- the faults -----------------------------------------------------------------------------------------


def _kill_sampler(host: Host) -> Callable[[], None]:
    host.exporter.sampler.kill()
    return lambda: None


def _stop_sampler(host: Host) -> Callable[[], None]:
    sampler = host.exporter.sampler
    sampler.suspend()

    def go_on() -> None:
        with suppress(psutil.NoSuchProcess):
            sampler.resume()

    return go_on


def _stop_exporter(host: Host) -> Callable[[], None]:
    process = host.exporter.process
    process.suspend()
    return process.resume


def _hang(host: Host) -> Callable[[], None]:
    for _ in range(host.draw.randrange(1, 4)):
        host.standin.hang(host.draw.choice(DRIVER), host.draw.choice((0, 1, None)))
    return host.standin.release


def _storm(host: Host) -> Callable[[], None]:
    codes = [code for code in (*range(2, 30), Code.UNKNOWN) if code not in (9, 18)]
    host.standin.chaos(codes=codes, fail=0.2, spoil=0.2, grow=0.2, slow=0.001, slow_us=500_000)
    return host.standin.chaos


def _any_code(host: Host) -> Callable[[], None]:
    host.standin.chaos(codes=[*range(1, 30), Code.UNKNOWN], fail=0.01, spoil=0.05)
    return host.standin.chaos


def _lose(host: Host) -> Callable[[], None]:
    device = host.standin.device(host.draw.randrange(2))
    device.lost = True

    def back() -> None:
        device.lost = False

    return back


def _reload(host: Host) -> Callable[[], None]:
    first, second = host.simulated.gpus
    # They come back under each other's index.
    first.uuids, second.uuids = ((-inf, second.uuid(0.0)),), ((-inf, first.uuid(0.0)),)
    host.show()
    host.standin.reload_driver()
    return lambda: None


def _show_devices(host: Host) -> None:
    """Make the device files of a loaded driver, as its first user does."""
    count = 0 if host.standin.driver_error else host.standin.device_count
    names = {f"nvidia{number}" for number in range(count)} | ({"nvidiactl"} if count else set())
    for each in host.devices.iterdir():
        if each.name not in names:
            each.unlink()
    for name in names:
        (host.devices / name).touch()


def _unload(host: Host) -> Callable[[], None]:
    host.standin.driver_error = Code.DRIVER_NOT_LOADED
    _show_devices(host)

    def load() -> None:
        host.standin.driver_error = Code.SUCCESS
        host.standin.reload_driver()
        _show_devices(host)

    return load


def _unplug(host: Host) -> Callable[[], None]:
    host.standin.device_count = 1
    host.standin.reload_driver()
    _show_devices(host)

    def plug() -> None:
        host.standin.device_count = 2
        host.standin.reload_driver()
        _show_devices(host)

    return plug


def _clock(host: Host) -> Callable[[], None]:
    (shift,) = struct.unpack("q", host.clock[:8])
    host.clock[:8] = struct.pack("q", shift + host.draw.choice((-86400, -3600, -30, 30, 3600, 86400)))
    return lambda: None


def _no_descriptors(host: Host) -> Callable[[], None]:
    processes = [host.exporter.process, host.exporter.sampler]
    before = [process.rlimit(resource.RLIMIT_NOFILE) for process in processes]
    for process, (_, hard) in zip(processes, before, strict=True):
        process.rlimit(resource.RLIMIT_NOFILE, (process.num_fds() + host.draw.randrange(3), hard))

    def enough() -> None:
        for process, limits in zip(processes, before, strict=True):
            with suppress(psutil.NoSuchProcess):
                process.rlimit(resource.RLIMIT_NOFILE, limits)

    return enough


def _no_memory(host: Host) -> Callable[[], None]:
    """Allow the sampler no more memory; an exporter without any ends, as every Python does."""
    process = host.exporter.sampler
    before = process.rlimit(resource.RLIMIT_DATA)
    process.rlimit(resource.RLIMIT_DATA, (1 << 20, before[1]))  # no further page of heap, and more to hold
    kept = host.simulated.processes
    host.simulated.processes = [Process(2**22 - number, {0: Fixed(GIB // 1024)}) for number in range(400)]
    host.show()

    def enough() -> None:
        with suppress(psutil.NoSuchProcess):
            process.rlimit(resource.RLIMIT_DATA, before)
        host.simulated.processes = kept

    return enough


def _crowd(host: Host) -> Callable[[], None]:
    """Start, list and end processes, a hundred a second, on reused pids."""
    stop = threading.Event()
    kept = host.simulated.processes
    first = int(Path("/proc/sys/kernel/pid_max").read_text(encoding="ascii")) - 300

    def live() -> None:
        while not stop.is_set():
            with suppress(OSError):  # a user who may choose the next pid reuses pids immediately
                Path("/proc/sys/kernel/ns_last_pid").write_text(str(first), encoding="ascii")
            children = [subprocess.Popen(["sleep", "0.05"]) for _ in range(20)]
            host.simulated.processes = [*kept, *(Process(each.pid, {0: Fixed(GIB)}) for each in children)]
            host.show()
            for child in children:
                child.wait()

    thread = threading.Thread(target=live)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        host.simulated.processes = kept

    return end


TRIALS = (
    # Loading a sampler takes a second here, and before the second one in ten seconds there is another: one
    # often follows soon after the other here, in a storm as well.
    Trial("sampler killed", _kill_sampler, (0.0, 0.0), after=4.0),
    Trial("sampler stopped", _stop_sampler, (0.1, 4.0), after=4.0),
    Trial("exporter stopped", _stop_exporter, (0.5, 4.0)),
    Trial("calls hang", _hang, (0.3, 3.0)),
    Trial("storm of errors and garbage", _storm, (1.0, 3.0), after=4.0),
    Trial("any code at all", _any_code, (1.0, 3.0), after=30.0),
    Trial("GPU lost", _lose, (0.5, 2.0)),
    Trial("GPUs back under other indices", _reload, (0.0, 0.0), after=4.0),
    Trial("driver unloaded", _unload, (0.5, 4.0), after=4.0),
    Trial("driver away for long", _unload, (12.0, 20.0), after=4.0),
    Trial("GPU unplugged", _unplug, (0.5, 3.0), after=4.0),
    Trial("clock steps", _clock, (0.5, 1.0)),
    Trial("no descriptors left", _no_descriptors, (0.5, 3.0), after=30.0),
    Trial("no memory left for the sampler", _no_memory, (0.5, 3.0), after=30.0),
    Trial("births and deaths", _crowd, (1.0, 3.0)),
)


@contextmanager
def host(directory: Path, seed: int) -> Iterator[Host]:
    """Run an exporter over two GPUs, each with two holders, with a clock that can be set."""
    library = directory / "clock.so"
    subprocess.run(
        [*compiler(), "-O2", "-fPIC", "-shared", "-o", library, _CLOCK, "-ldl"],
        check=True,
        capture_output=True,
    )
    shift = directory / "clock"
    shift.write_bytes(bytes(8))
    with ExitStack() as stack:
        file = stack.enter_context(shift.open("r+b"))
        clock = mmap.mmap(file.fileno(), 8)
        standin = stack.enter_context(StandIn(directory, build(directory), devices=2))
        standin.chaos(seed=seed)
        pids = stack.enter_context(Stage()).crowd(4)
        draw = random.Random(seed)  # noqa: S311 - a scenario, no secret
        gpus = simulated.Host(
            [Gpu(0), Gpu(1)],
            [Process(pid, {number % 2: Fixed((1 + number % 2) * GIB)}) for number, pid in enumerate(pids)],
            draw,
        )
        show(gpus.reading(0.0), standin, live=True)
        driver = {**standin.env(), "LD_PRELOAD": str(library), "VRAMLEDGER_CLOCK": str(shift)}
        devices = directory / "root" / "dev"
        devices.mkdir(parents=True)
        flags = (
            f"--sample.interval={INTERVAL * 1000:.0f}ms",
            "--sample.timeout=300ms",
            f"--path.rootfs={devices.parent}",
        )
        exporter = stack.enter_context(serving(*flags, driver=driver))
        exporter.until(lambda page: page.up, "data")
        here = Host(gpus, standin, exporter, draw, clock, devices)
        _show_devices(here)
        yield here


def undergo(host: Host, trial: Trial) -> float:
    """Run one fault, and return how many seconds after its end the page was right again.

    Raises:
        BrokenPromiseError: a page was not true, or never right again.
    """
    end = trial.begin(host)
    until = time.monotonic() + host.draw.uniform(*trial.lasts)
    try:
        while time.monotonic() < until:
            if trial.begin is _stop_exporter:
                time.sleep(0.05)
            else:
                host.look()
                time.sleep(0.05)
    finally:
        ended = time.monotonic()
        end()
    # New sizes, so that a page with them shows the state after the trial.
    for process in host.simulated.processes:
        process.places = {gpu: Fixed(host.draw.randrange(1, 60_000) * MIB) for gpu in process.places}
    host.show()
    page: Page | None = None
    while not host.well(page):
        if time.monotonic() - ended > PATIENCE:
            shown = "" if page is None else page.text
            message = (
                f"not right again {PATIENCE:.0f} s after: {trial.name}\n{shown}\n{host.exporter.log[-3000:]}"
            )
            raise BrokenPromiseError(message)
        time.sleep(0.02)
        page = host.look()
    return time.monotonic() - ended


def run(directory: Path, *, rounds: int, seed: int, trials: tuple[Trial, ...] = TRIALS) -> Iterator[Row]:
    """Run every fault this number of times, in random order; yields the rows of the table."""
    took: dict[str, list[float]] = {trial.name: [] for trial in trials}
    with host(directory, seed) as here:
        for _ in range(rounds):
            for trial in here.draw.sample(trials, len(trials)):
                took[trial.name].append(undergo(here, trial))
                print(f"{trial.name}: {took[trial.name][-1]:.2f} s", file=sys.stderr)
        pages, unreachable = here.pages, here.unreachable
    for trial in trials:
        times = sorted(took[trial.name])
        median = times[len(times) // 2]
        text = f"{len(times)} times; right again after {median:.2f} s (at most {times[-1]:.2f} s)"
        yield Row(trial.name, text, good=times[-1] <= INTERVAL + trial.after + 0.5)
    yield Row("pages looked at", f"{pages:,}, and {unreachable:,} times none was to be had", good=None)
