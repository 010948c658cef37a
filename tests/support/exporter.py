"""The commands as real processes; what holds for every page and end of an exporter is always checked."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.support.waiting import PATIENCE, wait_until
from vramledger.config import CONTROL_VARIABLE

QUICK = ("--sample.interval=100ms", "--sample.timeout=300ms")
SOURCES = Path(__file__).resolve().parents[2] / "exporter"
STATES = frozenset("dead zombie stuck orphaned stopped idle active unknown".split())
PARTS = STATES | {"free", "driver_reserved", "unattributed"}
NO_EXPORTER = "/nowhere"
"""A control socket that nobody listens on."""

LOOPBACK = "--web.listen-address=127.0.0.1:0"

Labels = tuple[tuple[str, str], ...]

_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

SAY_WHY = ("up", "asleep", "reset_required")
"""The families of a device that is down, besides its XID errors."""


class Page:
    """One scrape: a value for each (name, labels), by patterns that take a quarter of a parser's time."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.samples: dict[tuple[str, Labels], float] = {}
        found = _SAMPLE.findall(text)
        assert len(found) == sum(not line.startswith("#") for line in text.splitlines()), "lines of no form"
        for name, labels, value in found:
            key = (name, tuple(sorted((label, _plain(word)) for label, word in _LABEL.findall(labels))))
            assert key not in self.samples, f"this series is there twice: {key}"
            self.samples[key] = float(value)

    def value(self, name: str, **labels: object) -> float | None:
        """Return the value of the one series that has these labels (others do not matter), or None."""
        found = self.values(name, **labels)
        assert len(found) <= 1, f"{name} with {labels} is {len(found)} series"
        return next(iter(found.values()), None)

    def values(self, name: str, **labels: object) -> dict[Labels, float]:
        """Return the values of a family (without ``vramledger_``) by their labels, of those that match."""
        wanted = {(label, str(value)) for label, value in labels.items()}
        name = f"vramledger_{name}"
        return {
            key: value for (own, key), value in self.samples.items() if own == name and wanted <= set(key)
        }

    def labels(self, name: str, label: str, **labels: object) -> set[str]:
        return {dict(key)[label] for key in self.values(name, **labels)}

    def state(self, pid: int) -> str | None:
        """Return the state of a process, None when it holds nothing."""
        found = self.labels("process_state_since_timestamp_seconds", "state", pid=pid)
        assert len(found) <= 1
        return found.pop() if found else None

    @property
    def up(self) -> bool:
        """Whether the newest sample read the driver."""
        return self.value("up") == 1

    @property
    def time(self) -> float:
        return self.value("sample_timestamp_seconds") or 0.0

    def device_up(self, gpu: int) -> float | None:
        return self.value("device_up", gpu=gpu)

    def ledger(self, gpu: int) -> dict[str, int]:
        """Return a device's bytes by state, without the zeros."""
        values = self.values("device_memory_bytes", gpu=gpu)
        return {dict(key)["state"]: int(value) for key, value in values.items() if value}

    def failures(self, reason: str) -> float:
        return self.value("sample_failures_total", reason=reason) or 0.0

    @property
    def failing(self) -> set[str]:
        return {
            dict(key)["collector"] for key, value in self.values("collector_success").items() if not value
        }

    def ledger_series(self) -> dict[tuple[str, Labels], float]:
        """Return what a live scrape and a replay of its samples share: everything without a clock."""
        parts = "device_(up|info|memory_.*bytes|holders)|process_(memory_.*bytes|info)|processes_dropped"
        wanted = re.compile(f"vramledger_({parts})")
        return {key: value for key, value in self.samples.items() if wanted.fullmatch(key[0])}


def _plain(word: str) -> str:
    """Return a label's value without the escapes of the text format."""
    return re.sub(r"\\(.)", lambda each: "\n" if each[1] == "n" else each[1], word) if "\\" in word else word


def check(page: Page) -> None:
    """Assert the promises for every page: ledgers that balance, and no data where there is none."""
    data = [name for name, _ in page.samples if re.match(r"vramledger_(device|process|owner)_", name)]
    if not page.up:
        assert data == [], "without a driver there is no GPU data, old or new"
    up = {dict(key)["uuid"]: value for key, value in page.values("device_up").items()}
    for name, key in page.samples:
        if name.removeprefix("vramledger_device_") in SAY_WHY:
            continue
        if "uuid" in dict(key):
            assert up[dict(key)["uuid"]] == 1, f"a device that is down has no {name}"
    totals = page.values("device_memory_total_bytes")
    ledgers: dict[Labels, dict[str, float]] = {device: {} for device in totals}
    for key, value in page.values("device_memory_bytes").items():
        device = tuple(item for item in key if item[0] != "state")
        ledgers[device][dict(key)["state"]] = value
        assert value >= 0
        assert value == int(value)
    for device, parts in ledgers.items():
        assert sum(map(int, parts.values())) == int(totals[device]), "the ledger balances to the byte"
        assert set(parts) - {"driver_reserved"} == PARTS - {"driver_reserved"}
    for (name, key), value in page.samples.items():
        assert value - value == 0, f"{name} {key} is {value}, no number"


class Ended(NamedTuple):
    code: int
    log: str

    @property
    def messages(self) -> list[str]:
        """What it wrote besides its log."""
        return [line for line in self.log.splitlines() if not line.startswith(("time=", "{"))]


def entries(log: str) -> list[dict[str, str]]:
    """Read logfmt (a value in quotes may have escapes, which stay) or JSON."""
    return [
        json.loads(line)
        if line.startswith("{")
        else dict(word.partition("=")[::2] for word in shlex.split(line))
        for line in log.splitlines()
        if line.startswith(("time=", "{"))
    ]


def environment(driver: Mapping[str, str]) -> dict[str, str]:
    """Return a command's environment: our sources, this driver, and no exporter, instead of the host's."""
    ours = {"PYTHONPATH": str(SOURCES), CONTROL_VARIABLE: NO_EXPORTER}
    # Reading the host's authorities is a tenth of a start, and no test asks a server that they know.
    return {**os.environ, **ours, "SSL_CERT_FILE": os.devnull, **driver}


def no_driver(directory: Path) -> dict[str, str]:
    """Return the environment of a host without a driver library, even on a host that has one."""
    directory.mkdir(exist_ok=True)
    (directory / "libnvidia-ml.so.1").touch()
    return {"LD_LIBRARY_PATH": str(directory)}


def command(*arguments: str, python: str = sys.executable) -> list[str]:
    return [python, "-m", "vramledger", *arguments]


def run(
    *arguments: str, driver: Mapping[str, str], wrapper: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command that ends by itself; its output must not have a traceback."""
    done = subprocess.run(
        [*wrapper, *command(*arguments)], env=environment(driver), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=2 * PATIENCE, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return done


def alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


class Exporter:
    """A running ``vramledger serve``."""

    ended: Ended
    """How it ended, once it has."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, *, forks: bool) -> None:
        self.samplers: set[psutil.Process] = set()  # all that were seen; none may be left at the end
        self._popen = process
        self._log = log
        self._forks = forks
        self.port = 0
        self._newest = 0.0

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def process(self) -> psutil.Process:
        """The exporter itself, also behind a wrapper that forks."""
        process = psutil.Process(self._popen.pid)
        return process.children()[0] if self._forks else process

    @property
    def sampler(self) -> psutil.Process:
        """The sampler that runs now; waits until one does."""
        wait_until(self._find_samplers, "a sampler")
        (sampler,) = self._find_samplers()  # there is one at a time
        return sampler

    def _find_samplers(self) -> list[psutil.Process]:
        found = []
        for child in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if alive(child) and "vramledger.sampling.sampler" in " ".join(child.cmdline()[:3]):
                    found.append(child)
        self.samplers.update(found)
        return found

    def drivers(self) -> list[int]:
        """Return which of our processes have the driver library loaded or a device file open."""
        found = []
        for process in (self.process, *self.process.children(recursive=True)):
            home = Path(f"/proc/{process.pid}")
            targets = [os.readlink(each) for each in (home / "fd").iterdir()]  # noqa: PTH115 need not exist
            maps = (home / "maps").read_text(encoding="utf-8")
            opened = "/dev/nvidia" in maps or any(each.startswith("/dev/nvidia") for each in targets)
            if opened or "libnvidia-ml" in maps:  # the stand-in opens no device file: the library shows it
                found.append(process.pid)
        return found

    @property
    def found(self) -> dict[str, str]:
        """The environment in which a command finds this exporter."""
        return {CONTROL_VARIABLE: str(self._log.with_name("control"))}

    def listen(self) -> None:
        """Wait until it listens, and read the port."""

        def listening() -> bool:
            assert self._popen.poll() is None, f"the exporter ended:\n{self.log}"
            for entry in entries(self.log):
                if entry["msg"] == "Listening":
                    self.port = int(entry["address"].rpartition(":")[2])
            return bool(self.port)

        wait_until(listening, "the exporter to listen")

    def get(self, path: str, timeout: float = PATIENCE) -> tuple[int, str]:
        """Return status and text of a path."""
        url = f"http://127.0.0.1:{self.port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def scrape(self, timeout: float = PATIENCE) -> Page:
        """Scrape, and check the rules that every page must follow."""
        status, text = self.get("/metrics", timeout)
        assert status == 200, text
        page = Page(text)
        check(page)
        assert page.time >= self._newest, "a scrape never goes back to an older sample"
        self._newest = page.time
        return page

    def until(self, condition: Callable[[Page], object], what: str) -> Page:
        """Scrape until a page fulfils a condition, and return it."""
        pages: list[Page] = []

        def fulfilled() -> bool:
            pages[:] = [self.scrape()]
            return bool(condition(pages[0]))

        try:
            wait_until(fulfilled, what)
        except TimeoutError as error:
            shown = [line for line in pages[0].text.splitlines() if line.startswith("vramledger_")]
            raise TimeoutError("\n".join([f"{error}; the last page was:", *shown, self.log])) from None
        return pages[0]

    def next_sample(self) -> Page:
        """Return a page of a sample that began after this call, so it shows the driver's current state."""
        now = time.time()
        return self.until(lambda page: page.time > now, "the next sample")

    def stop(self, number: int = signal.SIGTERM) -> Ended:
        with suppress(psutil.NoSuchProcess):
            self._find_samplers()
            self.process.send_signal(number)
        code = self._popen.wait(PATIENCE)
        return Ended(code, self.log)

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess, IndexError):
            self.process.kill()
        self._popen.kill()
        self._popen.wait()


@contextmanager
def serving(
    *flags: str,
    driver: Mapping[str, str],
    wrapper: Sequence[str] = (),
    forks: bool = False,
    python: str = sys.executable,
) -> Iterator[Exporter]:
    """Run an exporter on a port of loopback; at the end it stops in order and leaves nothing behind.

    ``driver`` are variables that choose the driver library; a wrapper that ``forks`` stays as its parent.
    """
    with tempfile.TemporaryDirectory(prefix="exporter-") as directory:
        log = Path(directory, "log")
        sockets = (f"--agent.socket={directory}/agent", f"--control.socket={directory}/control")
        # Files of a test may be root's alone; whether another user may read this Python differs by machine.
        stays = python == sys.executable and not any(each.startswith("--web.user") for each in flags)
        user = ("--web.user=root",) if stays else ()
        with log.open("wb") as stderr:
            process = subprocess.Popen(
                [*wrapper, *command("serve", LOOPBACK, *sockets, *user, *flags, python=python)],
                env=environment(driver), stdin=subprocess.DEVNULL, stdout=stderr, stderr=stderr,
            )  # fmt: skip
        exporter = Exporter(process, log, forks=forks)
        try:
            exporter.listen()
            yield exporter
            if process.poll() is None:
                exporter.stop()
        finally:
            exporter.kill()
            exporter.ended = Ended(process.returncode, exporter.log)
        assert exporter.ended.code in (0, -signal.SIGKILL), exporter.ended.log
        assert exporter.ended.messages == [], exporter.ended.log  # only log lines, without warnings
        ours = {path.name for path in SOURCES.rglob("*.py")}  # and libraries have nothing to complain about
        assert {entry["source"].partition(":")[0] for entry in entries(exporter.ended.log)} <= ours
        wait_until(lambda: not any(map(alive, exporter.samplers)), "the samplers to end")


@contextmanager
def sampling(*flags: str, driver: Mapping[str, str], wrapper: Sequence[str] = ()) -> Iterator[Exporter]:
    """Run an exporter that samples fast, as :func:`serving` does, and wait for its data."""
    with serving(*QUICK, *flags, driver=driver, wrapper=wrapper) as exporter:
        exporter.until(lambda page: page.up, "data")
        yield exporter
