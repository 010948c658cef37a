"""What do thousands of other processes on the host cost us, at which the search for hidden holders looks?

It is measured without the crowd, with it, and the same in reverse, so that a drift of the machine cancels.
"""

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench import cost
from tests.lab.bench.programs import running
from tests.lab.bench.scene import Scene, sleepers
from tests.lab.bench.table import Row
from vramledger.readers.hosts.hidden_holders import BUDGET, HiddenSearch
from vramledger.readers.hosts.host import Host

CROWD = 5000
_MOST = 0.01  # of a core
_WARM_UP = 3.0


def _cpu(scene: Scene, seconds: int) -> float:
    with running(scene, "ours") as program:
        time.sleep(_WARM_UP)
        with cost.cpu_share(program.pid) as share:
            time.sleep(seconds)
        return share[0]


def _round() -> float:
    """Return the seconds of a search through all processes without a limit."""
    search = HiddenSearch(Host(Path("/proc"), Path("/")), {os.getpid()})
    begun = time.process_time()
    while not search.complete:
        search.search((), float("inf"))
    return time.process_time() - begun


def measure(scene: Scene, *, turns: int, seconds: int, crowd: int = CROWD) -> Iterator[Row]:
    """Yield what the crowd adds to our CPU time, and the time of a round of the search with it."""
    without = [_cpu(scene, seconds)]
    with sleepers(crowd):
        within = [_cpu(scene, seconds) for _ in range(turns)]
        whole = _round()
    without += [_cpu(scene, seconds) for _ in range(turns - 1)]
    extra = statistics.mean(within) - statistics.mean(without)
    at = f"{scene.name}, {crowd:,} others"
    yield Row(at, "CPU, beyond that without other processes", extra, unit="CPU", bar=_MOST)
    yield Row(at, "a search of all processes, CPU", whole, unit="s")
    yield Row(at, f"a search at {BUDGET * 1e3:g} ms a second", whole / BUDGET, unit="s")
