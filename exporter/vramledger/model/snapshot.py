"""Define what a finished sample publishes: immutable, complete, ready to be shown.

Data and health are separate: a failed sample is a snapshot with ``up`` False and no devices, never the
devices of an earlier one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Struct, field

from vramledger.model.agent_report import AgentReport, AgentSocket, ReportedRank
from vramledger.model.holder_facts import KnownHolderFacts
from vramledger.model.reading import (
    DeviceReading,
    HiddenHolder,
    Owner,
    PodLabels,
    ProcessFacts,
    ProcessRow,
    Rank,
)
from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS

UNKNOWN = "unknown"


class Policy(NamedTuple):
    """A verdict; ``source`` is ``agent``, ``environ``, ``pattern``, ``default`` or ``none``."""

    framework: str = UNKNOWN
    policy: str = UNKNOWN
    source: str = "none"
    why: str = "nothing is known of what it has loaded"


NO_POLICY = Policy()


UnixTime = Annotated[float, msgspec.Meta(extra={"clock": "unix"})]
"""Seconds since 1970. What the accounting remembers as one is moved when the host's clock is set."""


class State(str, enum.Enum):
    """Why a holding exists now; the first state that applies wins, in this order."""

    DEAD = "dead"
    ZOMBIE = "zombie"
    STUCK = "stuck"
    ORPHANED = "orphaned"
    STOPPED = "stopped"
    IDLE = "idle"
    ACTIVE = "active"
    UNKNOWN = "unknown"


class Grade(str, enum.Enum):
    """How good the evidence for a state is."""

    PROVEN = "proven"
    """Counted by the hardware, or attested by the kernel."""
    SEEN = "seen"
    """The device did nothing most of the time, and all work in the rest was another holder's."""
    INFERRED = "inferred"
    """From circumstances: it may be otherwise."""


WASTED_STATES = frozenset({State.DEAD, State.ZOMBIE, State.STUCK, State.STOPPED})
"""States in which memory is always wasted; idle and orphaned memory is, if its holder certainly rests."""


LEFTOVERS = frozenset({State.DEAD, State.ZOMBIE, State.STUCK, State.ORPHANED})
"""The states of what is left over from work that has ended."""


class UnchargedBytes(NamedTuple):
    """What a holder has on a device besides what NVML charges to it."""

    least: int  # bytes that are certainly its own
    most: int  # bytes that it can have at most; about as many as ``least`` where that is exact
    # those of ``least`` that are managed memory, which gives way to an allocation of another program
    managed: int
    grade: Grade  # how good the evidence for ``least`` is, or for the range
    why: str  # the evidence, one sentence


class UndividedBytes(NamedTuple):
    """Bytes that NVML charges to nobody and that one of several holders has, or several of them together."""

    bytes: int  # how many
    pids: tuple[int, ...]  # who can have them, among the holders that NVML lists
    state: State  # the state under which the ledger counts them, the mildest of these holders
    wasted: bool  # all of these holders hold their memory without any work
    # type and name of the owner of all of them; None if they have several, or if it is not known
    owner: tuple[str, str] | None


class LeftBytes(NamedTuple):
    """Memory that a holder left behind when it ended, because another process has a handle of it."""

    pid: int  # who had created it
    user: str | None  # the name of its user, None when not known
    ended: float  # Unix time at which its end was seen
    least: int  # bytes that are certainly still there
    most: int  # bytes that can still be there
    pids: tuple[int, ...]  # the holders that can have them
    why: str  # the evidence, one clause


class Holding(Struct, frozen=True):
    """The bytes that one process has on one device."""

    pid: int  # as NVML lists it
    start: int | None  # start time in ticks since boot, None when /proc does not show the process
    memory: int | None  # bytes as NVML reports them, None when it does not
    peak: int | None  # highest ``memory`` since we first saw this holding, None when never known
    kinds: str  # see :class:`vramledger.model.reading.ProcessEntry`
    state: State  # why it exists now
    since: float  # Unix time at which that began; for ``idle`` the last sign of work, or the first sample
    why: str  # the evidence, one sentence
    sm: float | None = None  # SM utilisation as a ratio, None when the driver gave no sample
    last_active: float | None = None  # Unix time of the last sign of GPU work, None when none was ever seen
    quiet_since: float | None = None  # Unix time since which every sample gave evidence of quiet
    evidence: bool = False  # whether the newest sample gave evidence of work or of quiet
    # True if work was seen within the idle threshold, False if it is proven or seen that there was none for
    # at least that long, None while neither is known
    working: bool | None = None
    grade: Grade = Grade.INFERRED  # how good the evidence for the state is
    # Unix time since which it keeps the device busy, which has computed and moved nothing; None when that is
    # not so, not for minutes yet, or not known
    busy_without_work_since: float | None = None
    # what it has besides ``memory``, None when it has nothing, or when nothing is known
    uncharged: UnchargedBytes | None = None

    @property
    def held(self) -> int | None:
        """All bytes that are certainly its own, charged or not; None when NVML does not report them."""
        return (
            self.memory
            if self.memory is None or self.uncharged is None
            else self.memory + self.uncharged.least
        )

    @property
    def left_over(self) -> bool:
        """Whether it is left over from work that has ended: nothing acts on what is only inferred."""
        unsure = self.state is State.ORPHANED and self.grade is Grade.INFERRED
        return self.state in LEFTOVERS and not unsure

    @property
    def wasted(self) -> bool | None:
        """Whether the memory is held without any work, which for a live process must be proven or seen.

        None where that is not known of an idle or orphaned one.
        """
        if self.state in (State.IDLE, State.ORPHANED):
            return None if self.working is None else not self.working
        return self.state in WASTED_STATES


class Ledger(Struct, frozen=True):
    """A device's ledger, bytes: total = free + driver_reserved + operating_system + states + unattributed."""

    total: int  # all memory of the device
    free: int  # what a process could still take
    # the driver's own; None where the driver does not report it separately from used
    driver_reserved: int | None
    states: Mapping[State, int]  # bytes of the holdings by state, minus the overlap; every state is present
    unattributed: int  # used by no process that NVML lists, and by none that can be named
    overlap: int  # the excess of the sum of the holdings over used
    # bytes that NVML charges to no process; all that is not unattributed is among the states, or the
    # operating system's
    uncharged: int = 0
    # what the operating system holds for itself and for programs that NVML does not list, and pages that it
    # or the driver keeps after a program's end; None where it does not manage the memory, and where neither
    # this nor the holders are known
    operating_system: int | None = None

    @property
    def used(self) -> int:
        """Bytes that are neither free nor the driver's own reserve."""
        return self.total - self.free - (self.driver_reserved or 0)


class OwnerLimit(NamedTuple):
    """What an owner may take of a device by its cgroups, and what these are charged."""

    type: str  # see :class:`vramledger.model.reading.Owner`
    name: str
    cgroup: str | None  # the cgroup whose limit it reaches first; None without a limit
    maximum: int | None  # that limit, bytes
    used: int | None  # what that cgroup has, with those of other owners in it; None when not known
    minimum: int | None  # bytes that are guaranteed to its own cgroups; None when not known
    charged: int | None  # what its own cgroups are charged; None where that is not its own alone


class OwnerUsage(NamedTuple):
    """What one owner holds on one device, and has held."""

    # see :class:`vramledger.model.reading.Owner`; ``unknown``, or ``other`` for all beyond the limit
    type: str
    name: str  # its name, in the form of a label value
    held: Mapping[State, int]  # bytes now, by state; a state in which it holds nothing is left out
    byte_seconds: Mapping[State, float]  # bytes times seconds so far, by state
    # bytes held without any work (:attr:`Holding.wasted`) times seconds so far; None for an owner that has
    # wasted nothing
    wasted_byte_seconds: float | None
    # bytes that were freed when its holdings ended; None where the operating system manages the memory, which
    # keeps pages after a program's end
    freed: int | None
    not_freed: int  # bytes that were not freed then


class OwnerOoms(NamedTuple):
    """How many allocations of an owner's programs failed in a framework, and the Unix time of the newest."""

    type: str
    name: str
    framework: str
    failures: int
    last: float


class OwnerUsageTotals(NamedTuple):
    """What all owners have used of one device."""

    owners: tuple[OwnerUsage, ...]  # by type and name; also those that hold nothing any more
    dropped: int  # owners that hold memory now and are in ``other``
    uncounted: float  # seconds since the first sample for which no owner was charged

    @property
    def holding(self) -> int:
        """How many owners hold memory now."""
        named = sum(1 for each in self.owners if each.held and each.type != "other")
        return named + self.dropped


class Reservation(NamedTuple):
    """One reservation of a device.

    ``held`` tells whether its owner holds memory there, None when that is not known. ``user`` and ``account``
    are the scheduler's own; empty when not known.
    """

    type: str
    name: str
    scheduler: str
    held: bool | None
    user: str = ""
    account: str = ""


class ReservationStatus(NamedTuple):
    """The reservations of a device that a scheduler manages."""

    reservations: tuple[Reservation, ...]  # for whom, by type and name
    # pids of the holders whose owner certainly has no reservation of it; None when that is not known
    unreserved_pids: tuple[int, ...] | None
    schedulers: tuple[str, ...]  # the schedulers that manage it


class DeviceSnapshot(Struct, frozen=True):
    """One device of a snapshot."""

    reading: DeviceReading  # what the driver reported
    up: bool  # it answered in this sample
    # None when the device has no memory of its own, or did not report enough. For a compute instance it is
    # that of its GPU instance, with the holdings of all that share the memory
    ledger: Ledger | None = None
    used_peak: int | None = None  # highest used bytes over the last minute of samples
    holdings: tuple[Holding, ...] = ()  # largest first
    # processes with the device open that NVML does not list; None when not known
    hidden: tuple[HiddenHolder, ...] | None = None
    xids: Mapping[int, int] = field(default_factory=dict)  # XID errors by number since the exporter started
    blind: bool = False  # its holders cannot be seen from our PID namespace, so their number is not known
    # the owners of the memory; None when its holders are not known
    owner_usage: OwnerUsageTotals | None = None
    # its reservations; None when no known scheduler manages it
    reservation_status: ReservationStatus | None = None
    # whether it is busy for minutes at idle power without any holder; None when not known
    ghost: bool | None = None
    ghost_since: float | None = None  # Unix time since which it is a ghost, None if it is not
    # the UUID of the compute instance under which this memory is counted; None if it is counted under the
    # device itself
    memory_counted_under: str | None = None
    undivided: UndividedBytes | None = None  # bytes that one of several holders has; None if there are none
    left: tuple[LeftBytes, ...] = ()  # what ended holders have left behind
    limits: tuple[OwnerLimit, ...] = ()  # what its owners may take of it, where cgroups limit that

    @property
    def wasted(self) -> int | None:
        """Bytes held without any work; None without a ledger. Shared memory counts once."""
        if self.ledger is None:
            return None
        held = sum(each.held or 0 for each in self.holdings if each.wasted)
        if self.undivided is not None and self.undivided.wasted:
            held += self.undivided.bytes
        return min(held, self.ledger.used)

    @property
    def perhaps_wasted(self) -> int | None:
        """Bytes of idle and orphaned holders that perhaps work, perhaps not; None without a ledger."""
        if self.ledger is None or self.wasted is None:
            return None
        held = sum(each.held or 0 for each in self.holdings if each.wasted is None)
        undivided = self.undivided
        if undivided is not None and undivided.state in (State.IDLE, State.ORPHANED) and not undivided.wasted:
            held += undivided.bytes
        return min(held, self.ledger.used - self.wasted)

    @property
    def key(self) -> tuple[str, str]:
        """The two labels of every device series: index and UUID."""
        return str(self.reading.index), self.reading.uuid


class ProcessSnapshot(Struct, frozen=True):
    """One holder, over all devices."""

    pid: int  # as NVML lists it
    start_time: UnixTime  # Unix seconds
    facts: ProcessFacts | None  # the newest, None when they have not come yet
    first: ProcessFacts | None = None  # the facts when first seen, with the parent of that moment
    policy: Policy = NO_POLICY  # its framework and how that takes memory, with the evidence
    # framework and policy for labels that must not change: empty until they are certain to stay
    settled: tuple[str, str] = ("", "")
    reported_rank: ReportedRank | None = None  # the newest rank that its agent has reported, None without one

    @property
    def rank(self) -> Rank | None:
        """Which rank of a distributed job it is, None where that is not known.

        The agent is right where the two differ: a parent's environment may name the parent's own rank. Where
        they agree, the job keeps its name in the environment, which ranks without an agent have too.
        """
        named = None if self.facts is None else self.facts.rank
        reported = self.reported_rank
        if reported is None or (named is not None and named[:2] == (reported.number, reported.size)):
            return named
        return Rank(reported.number, reported.size, reported.job) if reported.job else None


class Pool(NamedTuple):
    """What a framework in a process reports of its memory on one device, through its agent."""

    framework: str  # a key of :data:`vramledger_agent.protocol.frameworks.REPORTING_FRAMEWORKS`
    ordinal: int | None  # the framework's own number of the device, where it gave one
    figures: Mapping[str, int]  # by the names there; counters among them never fall
    categories: Mapping[str, int]  # bytes by category, where it reports them
    managed: int | None = None  # bytes that are certainly managed memory, None where it does not know

    @property
    def general(self) -> dict[str, int]:
        """The figures that mean the same for every framework, by their general names."""
        return REPORTING_FRAMEWORKS[self.framework].general_figures(self.figures)


class AgentSnapshot(Struct, frozen=True):
    """What one process' agent reports."""

    up: bool  # it reports, and nothing in it failed lately
    # why ``up`` is False: ``missing``, ``silent``, ``refused``, ``degraded`` or ``foreign``; otherwise empty
    problem: str = ""
    why: str = ""  # the same as a sentence
    received: float | None = None  # Unix time of its newest report
    report: AgentReport | None = None  # the newest, None when none may be shown as current
    pools: Mapping[str, tuple[Pool, ...]] = field(default_factory=dict)  # its figures by device UUID
    unmapped: int = 0  # devices of the report that could not be assigned to one of ours
    # failures by provider; this and the following counters never fall
    errors: Mapping[str, int] = field(default_factory=dict)
    dropped: int | None = None  # reports that it could not send
    collections: int | None = None  # runs of Python's cyclic collector

    def pool(self, uuid: str) -> int | None:
        """Return what all frameworks together have taken on a device, None if one does not report it."""
        return _sum(pool.general.get("pool") for pool in self.pools.get(uuid, ()))

    def managed(self, uuid: str, charged: int) -> int | None:
        """Return what its frameworks report of managed memory on a device, None where they report none.

        A framework may know it. If none knows, and together they have taken more than NVML charges, it is
        managed memory too: a framework's pool is allocated as a whole in one way or in the other.
        """
        if known := sum(pool.managed or 0 for pool in self.pools.get(uuid, ())):
            return known
        general = (pool.general for pool in self.pools.get(uuid, ()))
        taken = sum(max(figures.get("pool", 0), figures.get("in_use", 0)) for figures in general)
        return taken if taken > charged else None

    def settings(self, framework: str) -> Mapping[str, str]:
        """Return the settings of a framework's allocator, as far as they are known."""
        reported = () if self.report is None else self.report.frameworks
        return next((each.settings for each in reported if each.framework == framework), {})

    def need(self, uuid: str) -> int | None:
        """Return the sum of each framework's peak of memory in use, None if one does not report it."""
        return _sum(pool.general.get("in_use_peak") for pool in self.pools.get(uuid, ()))


def _sum(parts: Iterable[int | None]) -> int | None:
    values = list(parts)
    known = [value for value in values if value is not None]
    return sum(known) if values and len(known) == len(values) else None


class Snapshot(KnownHolderFacts, frozen=True):
    """The newest finished sample, and the state of sampling; also what :mod:`holder_facts` declares."""

    serial: int = 0  # grows by one with each published snapshot, so a render can be shared
    up: bool = False  # the driver answered
    # (reason, message) when not up; also None before the first sample has ended
    failure: tuple[str, str] | None = None
    released_until: float | None = None  # see :class:`vramledger.model.reading.Reading`
    time: float | None = None  # Unix time of the sample, None before the first
    ended: float | None = None  # monotonic time at which the sample ended, None before the first
    duration: float = 0.0  # seconds that the sample took
    source: str = "nvml"  # ``nvml``, or ``replay`` when the data is a recording
    recording: str | None = None  # name of the recording, for a replay
    host_pid_namespace: bool | None = None  # see :class:`vramledger.model.reading.Reading`
    driver_version: str | None = None  # see :class:`vramledger.model.reading.Reading`
    cuda_version: str | None = None  # see :class:`vramledger.model.reading.Reading`
    devices: tuple[DeviceSnapshot, ...] = ()  # see :class:`DeviceSnapshot`
    # the holders that /proc shows, by pid
    processes: Mapping[int, ProcessSnapshot] = field(default_factory=dict)
    # what /proc says of every listed process in this sample, by pid
    rows: Mapping[int, ProcessRow] = field(default_factory=dict)
    # failed samples by reason, every reason present
    failures: Mapping[str, int] = field(default_factory=dict)
    # per collector of the sampler (succeeded, seconds)
    collectors: Mapping[str, tuple[bool, float]] = field(default_factory=dict)
    hidden_unreadable: int | None = None  # see :class:`vramledger.model.reading.Reading`
    # what the agents of holders report, by pid
    agents: Mapping[int, AgentSnapshot] = field(default_factory=dict)
    # the state of the agents' socket, None when there is no such socket
    agent_socket: AgentSocket | None = None
    ooms: tuple[OwnerOoms, ...] = ()  # failed allocations since the exporter started, by owner and framework
    # Unix time of the first sample; nothing is known of what was before. None before it
    watched_since: float | None = None
    unowned: tuple[int, ...] = ()  # pids of the holders whose owner (container, pod, job) has certainly ended
    pods: tuple[PodLabels, ...] = ()  # see :class:`vramledger.model.reading.Reading`

    def pod_labels_of(self, owner: Owner | None) -> dict[str, str] | None:
        """Return the allowed labels that the pod of an owner has; None when they are not known."""
        if owner is None:
            return None
        for each in self.pods:
            if (each.namespace, each.pod) == (owner.namespace, owner.pod):
                return {name: value for name, value in each.labels if value is not None}
        return None

    def facts_of(self, pid: int) -> ProcessFacts | None:
        """Return what is known of a holder, None when /proc hides it or its facts have not arrived yet."""
        process = self.processes.get(pid)
        return None if process is None else process.facts
