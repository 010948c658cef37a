"""The real engines, each started on loopback with its own files, and queried by its API."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml

from tests.support.ports import free_port
from tests.support.waiting import wait_until

REPOSITORY = Path(__file__).parents[3]
RULES = REPOSITORY / "alerts" / "*.rules.yml"
DEADLINE = 60.0

_T = TypeVar("_T")

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Engine:
    """A running engine: where it answers, and its process."""

    url: str
    pid: int

    def get(self, path: str, **query: str) -> Any:  # noqa: ANN401 JSON
        """Request a path of the API; None while it does not answer."""
        url = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 loopback
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            return None
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return None

    def query(self, expression: str, at: float | None = None) -> dict[Labels, float]:
        """Return what an instant query gives, by labels; nothing while there is no answer."""
        when = {} if at is None else {"time": str(at)}
        answer = self.get("/api/v1/query", query=expression, **when)
        rows = [] if answer is None else answer["data"]["result"]
        return {frozenset(row["metric"].items()): float(row["value"][1]) for row in rows}

    def value(self, expression: str) -> float:
        return next(iter(self.query(expression).values()), 0.0)

    @property
    def resident(self) -> int:
        pages = Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def until(condition: Callable[[], _T], what: str, deadline: float = DEADLINE) -> _T:
    """Wait for an engine, which takes longer than a program of ours."""
    return wait_until(condition, what, patience=deadline)


@contextmanager
def running(command: Sequence[str | Path], home: Path, url: str, ready: str = "/-/ready") -> Iterator[Engine]:
    """Run an engine for the length of the block, from the moment it is ready."""
    home.mkdir(parents=True, exist_ok=True)
    with (
        (home / "log").open("wb") as log,
        subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, cwd=home) as process,
    ):
        try:
            until(lambda: process.poll() is not None or _answers(url + ready), f"{command[0]} is ready")
            if process.poll() is not None:
                raise RuntimeError((home / "log").read_text(encoding="utf-8", errors="replace")[-2000:])
            yield Engine(url, process.pid)
        finally:
            process.kill()


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()  # noqa: S310 loopback
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False
    return True


@contextmanager
def simulated(hosts: int, gpus: int = 8, holders: int = 8) -> Iterator[int]:
    """Serve a simulated fleet from a separate process; yields its port."""
    command = [sys.executable, "-m", "tests.support.fleet.server", *map(str, (hosts, gpus, holders))]
    path = os.pathsep.join([str(REPOSITORY / "exporter"), str(REPOSITORY)])
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def scrape(port: int, hosts: int, interval: str, evaluation: str = "") -> dict[str, Any]:
    """Return a configuration that scrapes and evaluates a simulated fleet; each host gets its own name."""
    labels = [
        {"__metrics_path__": f"/hosts/{number}/metrics", "instance": f"gpu{number:04}"}
        for number in range(hosts)
    ]
    targets = [{"targets": [f"127.0.0.1:{port}"], "labels": each} for each in labels]
    times = {"scrape_interval": interval, "scrape_timeout": interval}
    return {
        "global": {**times, "evaluation_interval": evaluation or interval},
        "scrape_configs": [{"job_name": "vramledger", "static_configs": targets}],
    }


@contextmanager
def prometheus(
    program: Path, home: Path, config: dict[str, Any], *arguments: str, agent: bool = False
) -> Iterator[Engine]:
    """Run a Prometheus, of any version, as a server or as an agent."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    storage = "--storage.agent.path" if agent else "--storage.tsdb.path"
    files = (f"--config.file={home / 'prometheus.yml'}", f"{storage}={home / 'data'}")
    command: list[str | Path] = [program, *files, f"--web.listen-address=127.0.0.1:{port}", *arguments]
    with running(command, home, f"http://127.0.0.1:{port}") as engine:
        yield engine


@contextmanager
def victoria_metrics(program: Path, home: Path) -> Iterator[Engine]:
    """Run a single-node VictoriaMetrics, which shows new data immediately."""
    port = free_port()
    place = (f"-storageDataPath={home / 'data'}", f"-httpListenAddr=127.0.0.1:{port}")
    command: list[str | Path] = [program, *place, "-search.latencyOffset=0s", "-memory.allowedPercent=20"]
    with running(command, home, f"http://127.0.0.1:{port}", "/health") as engine:
        yield engine
