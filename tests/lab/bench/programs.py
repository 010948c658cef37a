"""The measured programs, started and scraped as Prometheus would."""

import gzip
import http.client
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.lab.bench import cost
from tests.lab.bench.scene import ROOT, Scene
from tests.support.ports import free_port

# Prometheus 3 sends this by default.
_HEADERS = {
    "Accept": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    "Accept-Encoding": "gzip",
    "User-Agent": "Prometheus/3.0.0",
}
_START_DEADLINE = 30.0


@dataclass(frozen=True)
class Page:
    """One scrape: seconds from the request to the last byte, and the text."""

    seconds: float
    text: str

    @property
    def series(self) -> int:
        return sum(1 for line in self.text.splitlines() if line and not line.startswith("#"))


@dataclass
class Program:
    pid: int  # its process
    port: int
    started: float = 0.0  # seconds from its start to the first page that says it works

    def __post_init__(self) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)

    def scrape(self) -> Page:
        """Scrape once, over a connection that is kept, as Prometheus does."""
        begun = time.perf_counter()
        self.connection.request("GET", "/metrics", headers=_HEADERS)
        answer = self.connection.getresponse()
        body = answer.read()
        seconds = time.perf_counter() - begun
        text = gzip.decompress(body) if answer.headers["Content-Encoding"] == "gzip" else body
        return Page(seconds, text.decode())


def ours(port: int) -> tuple[list[str], str]:
    """Return our command, and the line of its page when it works."""
    command = [sys.executable, "-m", "vramledger", "serve", f"--web.listen-address=127.0.0.1:{port}"]
    return command, "vramledger_up 1.0"


def peer(port: int) -> tuple[list[str], str]:
    """Return the peer's command, and a line of its page when it works; raises LookupError without it."""
    beside = Path(sys.executable).with_name("nvitop-exporter")
    path = str(beside) if beside.exists() else shutil.which("nvitop-exporter")
    if path is None:
        raise LookupError("nvitop-exporter is not installed; 'make bench' installs it")
    return [path, "--port", str(port), "--interval", "1"], "process_gpu_memory"


@contextmanager
def running(scene: Scene, which: str, *flags: str) -> Iterator[Program]:
    """Run ``ours`` or the ``peer`` (with more flags) during the block, from its first valid page.

    Raises RuntimeError with its last words if it gave none in time.
    """
    port = free_port()
    command, sign = ours(port) if which == "ours" else peer(port)
    command += flags
    log = scene.directory / f"{which}.log"
    with log.open("wb") as errors:
        begun = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=scene.env, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors
        )
    program = Program(process.pid, port)
    try:
        while sign not in _text(program):
            if process.poll() is not None or time.monotonic() - begun > _START_DEADLINE:
                raise RuntimeError(f"no data from {' '.join(command)}:\n{log.read_text()[-2000:]}")
            time.sleep(0.002)
        program.started = time.monotonic() - begun
        yield program
    finally:
        program.connection.close()
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def cpu_of_ours(scene: Scene, seconds: int, *flags: str) -> float:
    """Return the CPU share of an exporter that has settled and is scraped once a second."""
    with running(scene, "ours", *flags) as program:
        time.sleep(3.0)
        with cost.cpu_share(program.pid) as shares:
            for _ in range(seconds):
                time.sleep(1)
                program.scrape()
        return shares[0]


def _text(program: Program) -> str:
    """Return the page; empty while there is no answer."""
    try:
        return program.scrape().text
    except (OSError, http.client.HTTPException):
        program.connection.close()
        return ""
