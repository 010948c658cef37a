"""Two GPUs with programs whose bytes NVML charges to nobody, in figures that a test sets."""

from dataclasses import dataclass
from random import Random

import pytest

from tests.support.host.model import CONTEXT, GIB, MIB, Fault, Gpu, Host, Process, Use
from tests.support.host.scrapes import SimulatedExporter
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot

OWN = 9 * MIB
"""Uncharged bytes of each context, as measured."""


@dataclass(slots=True)
class Managed:
    """A program with managed memory, in figures that a test sets."""

    charged: int = 0  # bytes that NVML charges to it, besides its context
    resident: int = 0  # managed bytes on the card
    mapped: int | None = 0  # what it maps of /dev/nvidia-uvm
    pool: int = 0  # what its agent reports of CuPy's pool, if it has an agent

    def use(self, _: float) -> Use:
        pools = {"cupy": {"pool": self.pool, "in_use": self.pool}} if self.pool else {}
        return Use(CONTEXT + self.charged, 0.0, 1.0, pools, self.resident + OWN, self.mapped)


class Card:
    """Two GPUs of 80 GiB and the programs that a test starts there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nobody = [0, 0]
        gpus = [
            Gpu(0, 80 * GIB, GIB, lambda _: self.nobody[0]),
            Gpu(1, 80 * GIB, GIB, lambda _: self.nobody[1]),
        ]
        self.host = Host(gpus, [], Random(1))  # noqa: S311 nothing here is left to chance
        self.exporter = SimulatedExporter(self.host, idle_after=600.0)
        self.hidden: tuple[HiddenHolder, ...] = ()

    def start(
        self, pid: int, *programs: Managed, user: str = "ada", gpu: int = 0, agent: bool = False
    ) -> Managed:
        """Start a program on one GPU or, with two programs, on both."""
        places = dict(enumerate(programs)) if len(programs) > 1 else {gpu: programs[0]}
        process = Process(pid, places, begin=self.now, user=user, framework="cuda", agent=agent)
        self.host.processes = [*self.host.processes, process]
        return programs[0]

    def end(self, pid: int, *, leaving: int = 0) -> None:
        """Kill a program; bytes of it stay on the first GPU."""
        for process in self.host.processes:
            if process.pid == pid:
                process.end = self.now + 0.5
        self.nobody[0] += leaving

    def sample(self, seconds: int = 1) -> Snapshot:
        """Take a sample each second, and return the last."""
        for _ in range(seconds):
            self.now += 1
            snapshot = self.exporter.sample(self.now, hidden=self.hidden)
            for device in snapshot.devices:
                if device.up:
                    balanced(device)
        return snapshot

    def fail(self, gpu: int, since: int, until: int) -> None:
        """Let a GPU give no data in some samples, counted from the next one, which is 1."""
        span = self.now + since - 0.5, self.now + until + 0.5
        fault = Fault("device lost", *span, gpu=gpu, name="timeout")
        self.host.faults = [*self.host.faults, fault]

    def device(self, seconds: int = 3, gpu: int = 0) -> DeviceSnapshot:
        """Return a GPU after some samples; two readings settle what one alone does not."""
        return self.sample(seconds).devices[gpu]


def balanced(device: DeviceSnapshot) -> None:
    """Check that the ledger balances, and that every byte is given once."""
    ledger = device.ledger
    assert ledger is not None
    parts = sum(ledger.states.values()) + ledger.unattributed
    assert ledger.total == ledger.free + (ledger.driver_reserved or 0) + parts
    assert ledger.unattributed >= 0
    given = sum(each.uncharged.least for each in device.holdings if each.uncharged is not None)
    group = device.undivided.bytes if device.undivided is not None else 0
    assert given + group + ledger.unattributed == ledger.uncharged


def holding(device: DeviceSnapshot, pid: int) -> Holding:
    (found,) = [each for each in device.holdings if each.pid == pid]
    return found


def given_to(device: DeviceSnapshot, pid: int) -> tuple[int, int]:
    """Return the least and the most uncharged bytes of a pid."""
    uncharged = holding(device, pid).uncharged
    return (0, 0) if uncharged is None else (uncharged.least, uncharged.most)


def about(size: int) -> object:
    """Return what compares equal to a size within 1 %."""
    return pytest.approx(size, rel=0.01)
