"""How long from the start of the program to the first page that says ``vramledger_up 1``?"""

import statistics
from collections.abc import Iterator

from tests.lab.bench.programs import running
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row
from tests.support.standin.library import MEASURED_ON_H200

_MOST = 1.0


def measure(scene: Scene, *, times: int) -> Iterator[Row]:
    took = []
    for _ in range(times):
        with running(scene, "ours") as program:
            took.append(program.started)
    init = MEASURED_ON_H200["nvmlInit_v2"] / 1e6
    what = f"start to first data beyond nvmlInit, median of {times}"
    yield Row(scene.name, what, statistics.median(took) - init, unit="s", bar=_MOST)
