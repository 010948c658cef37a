"""The smallest simulated host: one GPU and one process that holds memory, sampled once a second."""

from random import Random
from typing import Any

from tests.support.host.model import EPOCH, GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.host.scrapes import SimulatedExporter
from vramledger.model.reading import ParentFacts, Reading
from vramledger.model.snapshot import Holding, Snapshot

NOW = float(EPOCH)
"""Unix time a second before the first sample."""

UUID = "GPU-0"
PID = 7
SHELL = ParentFacts(400, 50, "bash", "bash", init=False)
START = Process(PID, {}, begin=-900.0).start
"""Start of the holder, in ticks: 900 s before."""


class OneHolder:
    """A GPU of 80 GiB, 1 GiB of them the driver's, and a shell's job that holds 10 GiB and does nothing."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the beginning
        self.gpu = gpu(0)
        self.program = Fixed(10 * GIB)
        self.holder = Process(PID, {0: self.program}, begin=-900.0, user="ann", framework="", starter=SHELL)
        self.host = Host([self.gpu], [self.holder], Random(1))  # noqa: S311 nothing here is left to chance
        self.exporter = SimulatedExporter(self.host, idle_after=10.0)

    def reading(self, **changes: Any) -> Reading:  # noqa: ANN401 any field of a reading
        return self.host.reading(self.now, **changes)

    def sample(self, after: float = 1.0, **changes: Any) -> Snapshot:  # noqa: ANN401
        self.now += after
        return self.exporter.sample(self.now, **changes)

    def driver_says(self, **fields: Any) -> None:  # noqa: ANN401 any field of a device's reading
        """Let the driver say this of the device from now on, whatever the processes do."""
        self.gpu.says.update(fields)

    def holding(self, after: float = 1.0) -> Holding:
        (device,) = self.sample(after).devices
        (holding,) = device.holdings
        return holding

    def watch(self, seconds: int) -> Holding:
        for _ in range(seconds - 1):
            self.sample()
        return self.holding()

    def say_nothing_of_work(self) -> None:
        """Let the driver fail every query about work from now on."""
        self.driver_says(process_utilization=None, utilization=None, activity=None)

    def reuse_pid(self, memory: int) -> None:
        """Start another process half a second from now with the holder's pid and this number of bytes."""
        self.program = Fixed(memory)
        self.holder = Process(
            PID, {0: self.program} if memory else {}, begin=self.now + 0.5, user="ann", framework="",
            starter=SHELL,
        )  # fmt: skip
        self.host.processes = [*self.host.processes, self.holder]


def gpu(index: int) -> Gpu:
    """Make a device of 80 GiB whose UUID is its number, without unattributed bytes."""
    return Gpu(index, 80 * GIB, GIB, lambda _: 0, ((0.0, f"GPU-{index}"),))
