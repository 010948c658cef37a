"""The scene of every measurement: a stand-in driver as slow as an H200's, and real processes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.support.host.driver import show
from tests.support.host.model import MIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.players.stage import Stage
from tests.support.standin.library import StandIn, build

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Scene:
    standin: StandIn  # the driver
    devices: int  # how many GPUs it has
    holders: int  # processes that each GPU lists, all different
    env: Mapping[str, str]  # what a program needs to meet this driver, and to find the package and the tests
    directory: Path  # for files of the measurement

    @property
    def name(self) -> str:
        """Devices x holders on each."""
        return f"{self.devices}x{self.holders}"


@contextmanager
def sleepers(count: int, library: str = "") -> Iterator[list[int]]:
    """Start sleeping processes that map a library, yield their pids, and end them when the block ends."""
    with Stage() as stage:
        yield stage.crowd(count, library=library)


@contextmanager
def scene(directory: Path, devices: int, holders: int) -> Iterator[Scene]:
    """Set up GPUs whose calls take as long as measured, each with its own holders, one of them busy."""
    library = build(directory)
    with (
        # A holder without any of the driver's libraries is read again in each sample: its pid may be reused.
        sleepers(devices * holders, str(library)) as pids,
        StandIn(directory, library, devices=devices) as standin,
    ):
        standin.latencies()
        processes = [
            Process(pid, {place: Fixed((500 + number) * MIB, 0.4 if number == 0 else 0.0)})
            for place in range(devices)
            for number, pid in enumerate(pids[place * holders : (place + 1) * holders])
        ]
        host = Host([Gpu(index) for index in range(devices)], processes, Random(1))  # noqa: S311 no chance
        show(host.reading(0.0), standin, live=True)
        path = os.pathsep.join([str(ROOT / "exporter"), str(ROOT / "exporter/agent"), str(ROOT)])
        env = {**os.environ, **standin.env(), "PYTHONPATH": path}
        yield Scene(standin, devices, holders, env, directory)
