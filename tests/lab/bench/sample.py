"""Does a sample of eight GPUs take about as long as its slowest GPU?

What NVML takes is judged, and the whole sample where 8 holders a GPU are read in /proc; of 64 it is shown.
"""

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from tests.lab.bench.scene import ROOT, Scene, scene
from tests.lab.bench.table import Row
from tests.support.sure import sure
from vramledger.config import SamplingConfig
from vramledger.model.reading import Reading, decode
from vramledger.sampling.protocol import encode_config

_MOST = 1.5
_UNSETTLED = 3  # readings until every holder is known


@contextmanager
def sampling(on: Scene, config: SamplingConfig) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Run the real sampler; yield its pid and the lines of its readings."""
    command = [sys.executable, "-m", "vramledger.sampling.sampler", encode_config(config)]
    with subprocess.Popen(
        command, cwd=ROOT, env=on.env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        try:
            yield process.pid, iter(sure(process.stdout))
        finally:
            process.kill()


def readings(on: Scene, count: int) -> list[Reading]:
    """Return the readings of a settled sampler; five a second, so that many do not take long."""
    with sampling(on, SamplingConfig(interval=0.2)) as (_, lines):
        return [decode(line) for line in islice(lines, _UNSETTLED, _UNSETTLED + count)]


def measure(directory: Path, *, devices: int, holders: int, samples: int) -> Iterator[Row]:
    with scene(directory, devices, holders) as many:
        at, found = many.name, readings(many, samples)
    whole = statistics.median(each.duration for each in found)
    nvml = statistics.median(each.duration - each.collectors["process"][1] for each in found)
    slowest = statistics.median(each.collectors["ledger"][1] for each in found)
    same = "its slowest GPU"
    yield Row(at, "NVML part of a sample", nvml, slowest, "s", _MOST, same)
    yield Row(at, "sample with /proc", whole, slowest, "s", _MOST if holders == 8 else None, same)
