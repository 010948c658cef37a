"""What do 64 agents, each a process that reports once a second, cost the exporter?"""

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.lab.bench.programs import cpu_of_ours
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row
from tests.support.agent_client import report
from tests.support.players.stage import PlayerError, Stage

AGENTS = 64
GPUS = 8
_MOST = 0.05  # of a core, for reading, joining and writing 1,400 more series a second


def message(sequence: int, ordinal: int) -> dict[str, Any]:
    """Write a report of PyTorch on a device, with every possible field."""
    figures = dict.fromkeys(
        "reserved allocated active requested inactive_split reserved_peak allocated_peak reclaimable".split()
        + "largest_free_block private_pools alloc_retries ooms allocations".split(),
        2**28 + sequence,
    )
    categories = dict.fromkeys(("parameters", "gradients", "optimizer", "activations"), 2**26)
    devices = [{"ordinal": ordinal, **figures, "categories": categories}]
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


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="agents-") as directory:
        path = Path(directory, "agent.sock")
        with reporters(path, AGENTS) as pids:
            for index in range(scene.devices):  # they take turns in holding a GPU, without other holders
                turn = [(pid, 2**29) for pid in pids[index :: scene.devices]]
                scene.standin.device(index).set_processes(turn)
            quiet, busy = [], []
            for _ in range(turns):
                quiet.append(cpu_of_ours(scene, seconds, "--no-collector.agent"))
                busy.append(cpu_of_ours(scene, seconds, f"--agent.socket={path}"))
    share = statistics.mean(busy) - statistics.mean(quiet)
    yield Row(f"{scene.name}, {AGENTS} agents", "CPU, beyond that without", share, unit="CPU", bar=_MOST)
