"""What do thousands of other processes on the host cost us, at which the search for hidden holders looks?

It is measured without the crowd, with it, and the same in reverse, so that a drift of the machine cancels.
"""

import statistics
from collections.abc import Iterator

from tests.lab.bench.programs import cpu_of_ours
from tests.lab.bench.scene import Scene, sleepers
from tests.lab.bench.table import Row

CROWD = 5000
_MOST = 0.01  # of a core


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    without = [cpu_of_ours(scene, seconds)]
    with sleepers(CROWD):
        within = [cpu_of_ours(scene, seconds) for _ in range(turns)]
    without += [cpu_of_ours(scene, seconds) for _ in range(turns - 1)]
    extra = statistics.mean(within) - statistics.mean(without)
    at = f"{scene.name}, {CROWD:,} others"
    yield Row(at, "CPU, beyond that without other processes", extra, unit="CPU", bar=_MOST)
