"""The exporter's cost and figures on this host, which only a real GPU can give."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.tools.recordings.recorder import TroubleError
from tests.tools.recordings.stage import Program, Stage, child_of, stat_of

SCRAPES = 30


def commands(stage: Stage) -> Iterator[str]:
    """Yield the output of ``doctor`` and ``show`` with two holders, and the cost of each NVML call."""
    with _holders(stage):
        for command in (["doctor"], ["show", "--idle-after=2s"]):
            yield _output(stage, [sys.executable, "-m", "vramledger", *command])
        cost = Path(__file__).parent / "programs" / "nvml_cost.py"
        yield _output(stage, [sys.executable, str(cost)])


def exporter(stage: Stage) -> Iterator[str]:
    """Yield the figures of ``serve`` with two holders, one of them busy."""
    with _holders(stage):
        port = _free_port()
        begun = time.monotonic()
        server = stage.run(
            [sys.executable, "-m", "vramledger", "serve", f"--web.listen-address=127.0.0.1:{port}"]
        )
        url = f"http://127.0.0.1:{port}/metrics"
        _until(lambda: _value(url, "vramledger_up") == 1.0, "vramledger_up 1", 30)
        yield f"from exec to the first sample: {time.monotonic() - begun:.2f} s"
        sampler = child_of(server.pid)
        seconds = 5 if stage.rehearsing else SCRAPES
        yield from _scrapes(url, server.pid, sampler, seconds)
        yield from _sampler_killed(url, sampler)
        yield from _terminated(stage, server)


def _scrapes(url: str, server: int, sampler: int, count: int) -> Iterator[str]:
    took, samples, sizes = [], [], []
    before = {pid: _cpu(pid) for pid in (server, sampler)}
    begun = time.monotonic()
    page = b""
    for number in range(count):
        time.sleep(max(0.0, begun + number - time.monotonic()))
        started = time.perf_counter()
        raw, page = _get(url)
        took.append(time.perf_counter() - started)
        sizes.append(len(raw))
        samples.append(_find(page, "vramledger_sample_duration_seconds") or 0.0)
    time.sleep(max(0.0, begun + count - time.monotonic()))
    span = time.monotonic() - begun
    series = sum(1 for line in page.splitlines() if line and not line.startswith(b"#"))
    yield (
        f"{count} scrapes: median {statistics.median(took) * 1000:.2f} ms, longest {max(took) * 1000:.2f} ms,"
        f" {series} series, {len(page)} bytes, {sizes[-1]} compressed"
    )
    for name, pid in (("exporter", server), ("sampler", sampler)):
        used = (_cpu(pid) - before[pid]) / span * 1000
        yield f"{name}: {used:.1f} ms of CPU a second, {_memory(pid)}"
    yield (
        f"vramledger_sample_duration_seconds: median {statistics.median(samples) * 1000:.2f} ms,"
        f" longest {max(samples) * 1000:.2f} ms"
    )


def _sampler_killed(url: str, sampler: int) -> Iterator[str]:
    os.kill(sampler, signal.SIGKILL)
    begun = time.monotonic()
    _until(lambda: _value(url, "vramledger_up") == 0.0, "vramledger_up 0", 20)
    down = time.monotonic() - begun
    _until(lambda: _value(url, "vramledger_up") == 1.0, "vramledger_up 1 again", 40)
    up = time.monotonic() - begun
    _, page = _get(url)
    counted = [
        line.decode() for line in page.splitlines() if line.startswith(b"vramledger_sample_failures_total")
    ]
    counted = [line for line in counted if not line.endswith((" 0", " 0.0"))]
    yield f"sampler SIGKILLed: up 0 after {down:.2f} s, up 1 after {up:.2f} s; {counted}"


def _terminated(stage: Stage, server: Program) -> Iterator[str]:
    ours = {server.pid, child_of(server.pid)}
    begun = time.monotonic()
    server.signal(signal.SIGTERM)
    status = server.process.wait(timeout=20)
    yield f"SIGTERM: exit status {status} after {time.monotonic() - begun:.2f} s"
    left = [pid for pid in ours if (row := stat_of(pid)) is not None and row[0] not in "ZX"]
    open_by = {pid: names for pid in _pids() if (names := _device_files(pid))}
    holders = set(stage.marked())
    yield f"processes of ours left: {left}; device files open by others than the holders: " + str(
        {pid: names for pid, names in open_by.items() if pid not in holders}
    )


@contextmanager
def _holders(stage: Stage) -> Iterator[None]:
    busy = stage.hold("busy", 10, "--busy")
    idle = stage.hold("idle", 20, "--device", 1)
    busy.wait_for("busy")
    idle.wait_for("idle")
    try:
        yield
    finally:
        stage.clear()


def _output(stage: Stage, command: list[str]) -> str:
    begun = time.monotonic()
    done = subprocess.run(command, env=stage.env(), capture_output=True, text=True, timeout=60, check=False)
    name = " ".join(command[1:]).replace(str(Path.cwd()) + "/", "")
    return (
        f"$ {name}   (exit status {done.returncode}, {time.monotonic() - begun:.2f} s)\n"
        f"{done.stdout.rstrip()}\n{done.stderr.rstrip()[-2000:]}".rstrip()
    )


def _get(url: str) -> tuple[bytes, bytes]:
    request = urllib.request.Request(url, headers={"Accept-Encoding": "gzip"})  # noqa: S310 our own server
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310
        raw = answer.read()
        return raw, gzip.decompress(raw) if answer.headers.get("Content-Encoding") == "gzip" else raw


def _find(page: bytes, series: str) -> float | None:
    for line in page.splitlines():
        if line.startswith(series.encode() + b" "):
            return float(line.split()[-1])
    return None


def _value(url: str, series: str) -> float | None:
    with contextlib.suppress(urllib.error.URLError, OSError, http.client.HTTPException):
        return _find(_get(url)[1], series)
    return None


def _until(condition: Callable[[], bool], what: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            message = f"waited {timeout:.0f} s in vain for {what}"
            raise TroubleError(message)
        time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu(pid: int) -> float:
    row = stat_of(pid)
    return 0.0 if row is None else (int(row[11]) + int(row[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> str:
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("VmRSS", "RssAnon", "Threads"):
                found[name] = value.strip()
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _device_files(pid: int) -> list[str]:
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{number}")  # noqa: PTH115
                if target.startswith("/dev/nvidia"):
                    found.add(target)
    return sorted(found)
