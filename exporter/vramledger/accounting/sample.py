"""Hold one reading, and what every step of its accounting needs to know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vramledger.accounting.holders.states import StateVerdict
from vramledger.accounting.work.thread_times import DeviceSigns, ThreadQuiet
from vramledger.model.reading import DeviceReading, ProcessRow, ProcessUtilization, Reading
from vramledger.model.snapshot import UnixTime

Clock = tuple[float, UnixTime]
"""A moment: monotonic and Unix time, seconds."""


@dataclass(slots=True)
class Sample:
    """What the accounting steps pass on to each other."""

    reading: Reading  # what was read
    rows: Mapping[int, ProcessRow]  # the processes that /proc shows, by pid
    longest_gap: float  # seconds; if the sample before is further away, samples are missing between them
    after_gap: bool  # samples are missing before this one, or it is the first
    # the samples that are missing before this one are those of a short restart, after which everything that
    # was remembered is known again
    bridged: bool = False
    # seconds from the sample before until the newest look at the GPUs, which found them unchanged; 0 without
    # one
    watched: float = 0.0
    # the state that a process has on all its devices, by pid; None where each device's work decides
    verdicts: Mapping[int, StateVerdict | None] = field(default_factory=dict)
    # since when the threads of each process have been quiet, by pid and start time
    threads: Mapping[tuple[int, int], ThreadQuiet] = field(default_factory=dict)
    # the CPU seconds of each process since the sample before, by pid
    cpu: Mapping[int, float] = field(init=False)
    time: float = field(init=False)  # Unix time of the sample, seconds
    monotonic: float = field(init=False)  # monotonic time of the sample, seconds
    clock: Clock = field(init=False)  # both, the monotonic time first

    def __post_init__(self) -> None:
        # Plain attributes, not properties: every holding reads them, 512 on a host with 8 GPUs and 64 holders
        # each.
        self.time, self.monotonic = self.reading.time, self.reading.monotonic
        self.clock = (self.monotonic, self.time)
        self.cpu = dict(self.reading.cpu_taken)

    def started_at(self, start: int) -> float:
        return started_at(self.reading, start)


class WorkEvidence(NamedTuple):
    """What a sample of a device says of the work of its holders."""

    workers: frozenset[int] = frozenset()  # the pids that worked since the sample before
    # since when the counters have proven that the device did nothing; None when it did something, or there
    # are no counters
    nothing_since: Clock | None = None
    nothing_seconds: float = 0.0  # for how long they have proven it, since the first sample altogether
    # since when all work was done in short bursts by processes that the driver named, and ``nothing_seconds``
    # of that moment; None without counters
    attributed_since: tuple[Clock, float] | None = None
    unknown: bool = True  # the device worked, or may have worked, and nothing says for whom
    clients_unknown: bool = True  # the same for a client of MPS
    # the clients of MPS: the driver names their server in place of them
    clients: frozenset[int] = frozenset()
    busy: bool = False  # whether the device worked since the sample before
    # since when every sample had rows, and all work was somebody's whom they named
    named_since: Clock | None = None
    free_at: float | None = None  # monotonic time of the newest sample in which the device was not fully busy
    rated: bool = False  # whether the device has a rate of utilisation

    def signs_for(self, pid: int) -> DeviceSigns:
        return DeviceSigns(self.named_since, self.free_at, self.rated, client=pid in self.clients)

    def shows_quiet(self, pid: int) -> bool:
        """Tell whether the sample would show work of this holder."""
        return not (self.clients_unknown if pid in self.clients else self.unknown)


class DeviceSample(NamedTuple):
    sample: Sample  # the sample
    device: DeviceReading  # what the driver reported
    # the holders' own utilisation samples, as far as the driver gave any, by pid
    utilization: Mapping[int, ProcessUtilization]
    work: WorkEvidence  # what it says of the holders' work


def started_at(reading: Reading, start: int) -> float:
    """Return the Unix time of a process' start, given in ticks since boot."""
    return reading.boot_time + start / reading.ticks


def forget_ended(known: dict[int, dict[int, Any]], lives: Callable[[int, int], bool]) -> None:
    """Forget what is known, by pid and start, of processes that do not live any more."""
    for pid, starts in list(known.items()):
        for start in [each for each in starts if not lives(pid, each)]:
            del starts[start]
        if not starts:
            del known[pid]
