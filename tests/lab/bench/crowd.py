"""What do thousands of other processes on the host cost us, at which the search for hidden holders looks?

It is measured without the crowd, with it, and the same in reverse, so that a drift of the machine cancels.
"""

import statistics
import time
from collections.abc import Iterator

from tests.lab.bench import cost
from tests.lab.bench.programs import running
from tests.lab.bench.scene import Scene, sleepers
from tests.lab.bench.table import Row

CROWD = 5000
_MOST = 0.01  # of a core
_WARM_UP = 3.0


def _cpu(scene: Scene, seconds: int) -> float:
    with running(scene, "ours") as program:
        time.sleep(_WARM_UP)
        with cost.cpu_share(program.pid) as share:
            time.sleep(seconds)
        return share[0]


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    without = [_cpu(scene, seconds)]
    with sleepers(CROWD):
        within = [_cpu(scene, seconds) for _ in range(turns)]
    without += [_cpu(scene, seconds) for _ in range(turns - 1)]
    extra = statistics.mean(within) - statistics.mean(without)
    at = f"{scene.name}, {CROWD:,} others"
    yield Row(at, "CPU, beyond that without other processes", extra, unit="CPU", bar=_MOST)
