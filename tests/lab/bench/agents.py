"""What do 64 agents, each a process that reports once a second, cost the exporter, and reading a report?"""

import itertools
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lab.bench import cost
from tests.lab.bench.programs import Page, Program, running
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row
from tests.support.agent_client import report
from tests.support.players.stage import PlayerError, Stage
from vramledger.model.agent_report import parse, read_report

AGENTS = 64
GPUS = 8
_MOST = 0.05  # of a core, for reading, joining and writing 1,400 more series a second
_WARM_UP = 3.0


def message(sequence: int, *ordinals: int) -> dict[str, Any]:
    """Write a report of PyTorch on these devices, with every possible field."""
    figures = dict.fromkeys(
        "reserved allocated active requested inactive_split reserved_peak allocated_peak reclaimable".split()
        + "largest_free_block private_pools alloc_retries ooms allocations".split(),
        2**28 + sequence,
    )
    categories = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 2**26)
    devices = [{"ordinal": ordinal, **figures, "categories": categories} for ordinal in ordinals]
    torch = {"supported": True, "allocator": "native", "devices": devices}
    return report(
        sequence,
        monotonic=time.clock_gettime(time.CLOCK_BOOTTIME),
        visible={"CUDA_VISIBLE_DEVICES": None, "CUDA_DEVICE_ORDER": None},
        errors={"torch": 0},
        collector={"enabled": True, "collections": sequence},
        frameworks=[{"framework": "torch", "version": "2.13.0", "policy": "caching", **torch}],
    )


@contextmanager
def reporters(path: Path, count: int) -> Iterator[list[int]]:
    """Have agents that report to a path once a second, each at a moment of its own; yields their pids.

    Each connects when there is somebody to connect to.
    """
    done = threading.Event()
    with Stage() as stage:
        agents = [stage.start() for _ in range(count)]

        def have_them_report() -> None:
            for turn in itertools.count(count):
                agent, sequence = agents[turn % count], turn // count
                try:
                    agent.order("say", message(sequence, turn % count % GPUS))
                except PlayerError:
                    with suppress(PlayerError):
                        agent.order("connect", str(path))
                if done.wait(1 / count):
                    return

        thread = threading.Thread(target=have_them_report)
        thread.start()
        try:
            yield [agent.pid for agent in agents]
        finally:
            done.set()
            thread.join()


def measure(scene: Scene, *, turns: int, seconds: int, agents: int = AGENTS) -> Iterator[Row]:
    """Yield what agents add to the exporter's CPU time, memory and scrapes, against none."""
    with tempfile.TemporaryDirectory(prefix="agents-") as directory:
        path = Path(directory, "agent.sock")
        with reporters(path, agents) as pids:
            _list(scene, pids)
            quiet, busy = [], []
            for _ in range(turns):
                quiet.append(_exporter(scene, seconds, "--no-collector.agent"))
                busy.append(_exporter(scene, seconds, f"--agent.socket={path}"))
    at = f"{scene.name}, {agents} agents"
    share, taken = (
        statistics.mean(each[pick] for each in busy) - statistics.mean(each[pick] for each in quiet)
        for pick in (0, 1)
    )
    yield Row(at, "CPU, beyond that without", share, unit="CPU", bar=_MOST)
    yield Row(at, "memory, beyond", taken, unit="B")
    scrapes = statistics.median(each[2] for each in busy), statistics.median(each[2] for each in quiet)
    yield Row(at, "a scrape", *scrapes, "s", None, "without agents")
    yield Row(at, "series", busy[-1][3], busy[-1][3] - busy[-1][4], "", None, "without agents'")
    data = json.dumps(message(1, *range(GPUS))).encode()
    begun = time.perf_counter()
    for _ in range(200):
        read_report(parse(data))
    yield Row(at, "reading a report of 8 GPUs", (time.perf_counter() - begun) / 200, unit="s")
    yield Row(at, "that report", len(data), unit="B")


def _list(scene: Scene, pids: list[int]) -> None:
    """Let the agents take turns in holding a GPU, without other holders."""
    for index in range(scene.devices):
        scene.standin.device(index).set_processes([(pid, 2**29) for pid in pids[index :: scene.devices]])


def _exporter(scene: Scene, seconds: int, *flags: str) -> tuple[float, float, float, int, int]:
    """Return CPU share, memory, seconds of a scrape, series, and the agents' series of an exporter."""
    with running(scene, "ours", *flags) as program:
        time.sleep(_WARM_UP)
        with cost.cpu_share(program.pid) as shares:
            pages = [_page_a_second(program) for _ in range(seconds)]
        page = pages[-1]
        lines = [line for line in page.text.splitlines() if not line.startswith("#")]
        theirs = sum(1 for line in lines if line.startswith(("vramledger_torch_", "vramledger_agent_")))
        taken = float(cost.memory(program.pid).rss)
        return shares[0], taken, statistics.median(each.seconds for each in pages), page.series, theirs


def _page_a_second(program: Program) -> Page:
    time.sleep(1)
    return program.scrape()
