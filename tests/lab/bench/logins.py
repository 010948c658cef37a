"""What do a thousand bad logins a second do to a scrape, and what does each cost?

Scrapes with the right password, one after the other, alone and under guesses from one address and from many:
guesses that are computed, guesses that are turned away, and the connections that they come on. The two phases
take turns, so that what else the machine does falls on both; of a thousand scrapes ten are above the figure.
"""

from __future__ import annotations

import base64
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import bcrypt

from tests.lab.bench.scene import ROOT, Scene
from tests.lab.bench.table import Row

RATE = 1000
_BAR = 2.0
_SCRAPES = 30  # a second, one of which finds a new sample
_PATIENCE = 30.0
_LOGIN = base64.b64encode(b"alice:wonder").decode()
_REQUEST = (
    "GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nConnection: close\r\n"
    f"Authorization: Basic {_LOGIN}\r\n\r\n"
).encode()


def _scrape(port: int) -> tuple[float, bytes]:
    begun = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(_REQUEST)
        answer = b"".join(iter(lambda: connection.recv(1 << 18), b""))
    return time.perf_counter() - begun, answer


@contextmanager
def _guarded(scene: Scene) -> Iterator[tuple[int, int]]:
    """Run an exporter with a password; yields its port and pid."""
    file = scene.directory / "web.yml"
    hashed = bcrypt.hashpw(b"wonder", bcrypt.gensalt(10)).decode()
    file.write_text(f"basic_auth_users: {{alice: {hashed}}}\n", encoding="utf-8")
    file.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    command = [
        *(sys.executable, "-m", "vramledger", "serve", f"--web.listen-address=127.0.0.1:{port}"),
        *(f"--web.config.file={file}", f"--control.socket={scene.directory / 'control.sock'}"),
    ]
    with (scene.directory / "guarded.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=scene.env, stderr=log)
    try:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                if _scrape(port)[1].startswith(b"HTTP/1.1 200"):
                    break
            except OSError:
                time.sleep(0.05)
            if time.monotonic() > deadline:
                message = (scene.directory / "guarded.log").read_text(encoding="utf-8")
                raise RuntimeError(message)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def _times(port: int, seconds: int) -> list[float]:
    taken = []
    begun = time.monotonic()
    for number in range(seconds * _SCRAPES):
        time.sleep(max(0.0, begun + number / _SCRAPES - time.monotonic()))
        needed, answer = _scrape(port)
        if not answer.startswith(b"HTTP/1.1 200"):
            message = f"a scrape with the right password got {answer[:60]!r}"
            raise RuntimeError(message)
        taken.append(needed)
    return taken


def _p99(times: Sequence[float]) -> float:
    return sorted(times)[math.ceil(len(times) * 0.99) - 1]


@dataclass
class _Phase:
    """Scrapes of one kind, and the CPU time of the exporter's event loop for them."""

    times: list[float] = field(default_factory=list)
    busy: float = 0.0

    def take(self, port: int, pid: int, seconds: int) -> None:
        before = _loop_cpu(pid)
        self.times += _times(port, seconds)
        self.busy += _loop_cpu(pid) - before


def _loop_cpu(pid: int) -> float:
    """Return the CPU seconds of a process's first thread; bcrypt and the renders have their own."""
    words = Path(f"/proc/{pid}/task/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    """Yield the 99th percentile of a scrape alone and with each kind of guesses, and a guess's CPU."""
    with _guarded(scene) as (port, pid):
        for addresses, how in ((1, "kept"), (1, "fresh"), (100, "kept"), (100, "fresh")):
            alone, under = _Phase(), _Phase()
            guesses = 0.0
            for _ in range(turns):
                alone.take(port, pid, seconds)
                command = [sys.executable, "-m", "tests.lab.bench.guesser"]
                words = map(str, (port, RATE, seconds + 1, addresses, how))
                with subprocess.Popen(
                    [*command, *words], cwd=ROOT, env=scene.env, stdout=subprocess.PIPE
                ) as guesser:
                    under.take(port, pid, seconds)
                    said, _ = guesser.communicate()
                statuses = json.loads(said)["statuses"]
                guesses += sum(statuses.values()) * seconds / (seconds + 1)
                print(f"{addresses} addresses, {how}: {statuses}", file=sys.stderr)
            where = f"under {RATE:,} bad logins a second, {addresses} address(es), {how} connections"
            times = _p99(under.times), _p99(alone.times)
            yield Row(scene.name, f"scrape p99 {where}", *times, "s", _BAR, "none")
            cost = max(0.0, under.busy - alone.busy) / guesses
            yield Row(scene.name, f"event loop's CPU for a guess {where}", cost, unit="s")
