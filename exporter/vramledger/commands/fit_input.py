"""Read what was seen of a program and of the GPUs: from ledgers as JSON, and from an out-of-memory report.

A ledger is what ``vramledger show --json`` prints, and what the exporter serves; a recording and a running
exporter give the same. The files may come from anybody, so each value is checked when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct, ValidationError, convert

from vramledger.errors import RecordingError
from vramledger.model.agent_report import Count
from vramledger.model.records import JSON_VERSION
from vramledger.verdicts.remedies import allocator_advice
from vramledger_agent.printable import printable
from vramledger_agent.protocol.frameworks import FRAMEWORKS_BY_NAME, REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import ALLOCATOR_SETTINGS, MAX_INTEGER

EVICTABLE_STATES = ("idle", "orphaned", "stopped", "zombie")
"""The states of a wasted holding that ``vramledger end`` ends; a dead or stuck one needs a reset."""

_MAX_TEXT = 300
_T = TypeVar("_T")


Number = Annotated[float, Meta(ge=0, le=MAX_INTEGER)]


class _FrameworkSeen(Struct, frozen=True):
    framework: str = ""
    ordinal: Count | None = None
    in_use_peak: Count | None = None
    pool: Count | None = None
    reserved: Count | None = None
    inactive_split: Count | None = None
    reclaimable: Count = 0
    settings: Mapping[str, str] = {}


class _OutOfMemorySeen(Struct, frozen=True):
    requested: Count | None = None
    on_this_device: bool | None = None


class _AgentSeen(Struct, frozen=True):
    overhead: Count | None = None
    frameworks: tuple[_FrameworkSeen, ...] = ()
    consents: tuple[str, ...] = ()
    last_oom: _OutOfMemorySeen | None = None


class _UnchargedSeen(Struct, frozen=True):
    least: Count = 0


class _HoldingSeen(Struct, frozen=True):
    pid: Count = 0
    user: str = ""
    owner: Mapping[str, str] = {}
    command: str = ""
    started: Number | None = None
    limited_by: tuple[str, ...] | None = None
    held: Count | None = None
    peak: Count | None = None
    uncharged: _UnchargedSeen = _UnchargedSeen()
    state: str = ""
    grade: str = ""
    wasted: bool | None = False
    framework: str = ""
    policy: str = ""
    sm_utilization: Number | None = None
    agent: _AgentSeen = _AgentSeen()


class _MemorySeen(Struct, frozen=True):
    total: Count | None = None
    free: Count | None = None
    driver_reserved: Count = 0


class _LimitSeen(Struct, frozen=True):
    cgroup: str = ""
    maximum: Count | None = None
    used: Count | None = None


class _DeviceSeen(Struct, frozen=True):
    uuid: str = ""
    gpu: Count | None = None
    name: str = ""
    mig_profile: str = ""
    memory_counted_under: str = ""
    divided: bool = False
    up: bool = False
    error: str = ""
    blind: bool = False
    memory: _MemorySeen | None = None
    utilization: Number | None = None
    activity: Mapping[str, Number] = {}
    holdings: tuple[_HoldingSeen, ...] = ()
    schedulers: tuple[str, ...] = ()
    reservations: tuple[Mapping[str, Any], ...] = ()
    cgroup_limits: tuple[_LimitSeen, ...] | None = None
    cgroup_limits_failed: bool = False


class _LedgerSeen(Struct, frozen=True):
    version: int
    devices: tuple[_DeviceSeen, ...]
    up: bool = False
    watched_since: Number | None = None
    failure: Mapping[str, str] = {}


class _HolderSeen(Struct, frozen=True, rename={"its_own": "self"}):
    bytes: Count | None = None
    its_own: bool = False


class _FailedDeviceSeen(Struct, frozen=True):
    uuid: str = ""
    gpu: Count | None = None
    name: str = ""
    holders: tuple[_HolderSeen, ...] = ()


class _ReportSeen(Struct, frozen=True):
    framework: str
    pool: Mapping[str, Any]
    pid: Count = 0
    ordinal: Count | None = None
    requested: Count | None = None
    capacity: Count | None = None
    limited: bool = False
    device: _FailedDeviceSeen = _FailedDeviceSeen()


def _read(raw: object, shape: type[_T], where: str, what: str) -> _T:
    """Return a document as far as we use it. Raises RecordingError if it is not such a document."""
    try:
        return convert(_told(raw), shape)
    except (ValidationError, RecursionError, UnicodeEncodeError) as error:
        raise RecordingError(f"{where} is not {what} ({printable(str(error))})") from error


class FrameworkUse(NamedTuple):
    """What one framework of the program reported on one device, in bytes; None means not known."""

    name: str  # as it is declared
    ordinal: int | None  # its own number of the device
    in_use_peak: int | None  # its highest use
    pool: int | None  # what it had taken from the driver
    advice: str = ""  # what a setting of its allocator would free, otherwise empty

    @property
    def title(self) -> str:
        """Return its name as its makers write it."""
        declared = FRAMEWORKS_BY_NAME.get(self.name)
        return self.name if declared is None else declared.title


class Busy(NamedTuple):
    """How busy a program kept a device while it was watched: shares of 1."""

    mean: float
    highest: float
    samples: int


class DeviceUse(NamedTuple):
    """What was seen of the program on one device until a sample; bytes, None means not known."""

    uuid: str  # of the device
    gpu: int | None  # its index
    name: str  # its product name
    capacity: int | None  # what programs can have of it, without the driver's reserve
    held: int | None  # what the program held, charged or not
    peak: int | None  # the highest of that so far
    overhead: int | None  # what it held outside the frameworks' pools, at most
    framework: str  # the one that holds the memory
    policy: str  # how that takes memory
    frameworks: tuple[FrameworkUse, ...]  # those that reported, each with its highest use in all samples
    whole_life: bool  # it was watched since its start, so ``peak`` is the peak of its life
    time_busy: Busy | None = None  # the share of the time in which it had a kernel on the device
    # the share of the device's SMs that its kernels kept busy, by the device's own counters
    sm_busy: Busy | None = None
    failed: bool = False  # an allocation has failed here, or perhaps here
    failed_request: int | None = None  # bytes of its newest allocation that failed here
    used_at_failure: int | None = None  # what the framework had in use at that moment
    peaks: Mapping[str, int] = {}  # the highest uses of frameworks that may report again

    def after(self, earlier: DeviceUse) -> DeviceUse:
        """Return this sample with the highest figures so far: a program may reset them."""
        peaks = {name: peak for name, peak in earlier.peaks.items() if name in FRAMEWORKS_BY_NAME}
        for each in (*earlier.frameworks, *self.frameworks):
            if each.in_use_peak is not None:
                peaks[each.name] = max(each.in_use_peak, peaks.get(each.name, 0))
        return self._replace(
            peak=_highest(self.peak, earlier.peak),
            overhead=_highest(self.overhead, earlier.overhead),
            frameworks=tuple(each._replace(in_use_peak=peaks.get(each.name)) for each in self.frameworks),
            time_busy=_joined(self.time_busy, earlier.time_busy),
            sm_busy=_joined(self.sm_busy, earlier.sm_busy),
            peaks=peaks,
        )


def _highest(*figures: int | None) -> int | None:
    return max((each for each in figures if each is not None), default=None)


def _joined(one: Busy | None, other: Busy | None) -> Busy | None:
    if one is None or other is None:
        return one or other
    samples = one.samples + other.samples
    mean = (one.mean * one.samples + other.mean * other.samples) / samples
    return Busy(mean, max(one.highest, other.highest), samples)


class Program(NamedTuple):
    """A program whose need is asked for."""

    pid: int  # its process id
    command: str = ""  # its name, empty when not known
    owner: tuple[str, str] = ("", "")  # type and name of its owner, empty when not known
    started: float | None = None  # Unix time, None when not known; another program may get its pid later
    # the cgroups above it that had a limit on any device; None when its cgroup is not known
    limited_by: tuple[str, ...] | None = None


class Evictable(NamedTuple):
    """Memory that its holder does not work with, or does not need: ``command`` says how it would be freed."""

    bytes: int
    what: str
    command: str


class CgroupRoom(NamedTuple):
    """What the programs in a cgroup may take of a device, bytes."""

    cgroup: str  # its path; empty where it is not known whether the cgroup of the program has a limit
    maximum: int | None  # the limit; None when not known
    used: int | None  # what the cgroup has, with all below it; None when not known

    @property
    def known(self) -> bool:
        """Tell whether both figures are known."""
        return self.maximum is not None and self.used is not None

    def most(self, own: int) -> int | None:
        """Return what a program can have at most that already has ``own``; None when not known."""
        if self.maximum is None or self.used is None:
            return self.maximum
        return min(self.maximum, max(0, self.maximum - self.used + own))


class OfferedDevice(NamedTuple):
    """A device on which a program may run."""

    uuid: str  # of the device
    gpu: int | None  # its index
    name: str  # its product name, for a MIG instance with profile and UUID: several have the same index
    capacity: int | None  # what programs can have of it, without the driver's reserve; None when not known
    free: int | None  # what a program could take now; None when not known
    problem: str  # why nothing is known of its memory, otherwise empty
    holdings: Mapping[int, int]  # bytes held by each pid
    evictable: Mapping[int, Evictable]  # what others hold without work, or have cached, by pid
    schedulers: tuple[str, ...]  # those that manage it
    granted: tuple[tuple[str, str], ...]  # type and name of the owners for whom it is reserved
    # what cgroups with a limit may take; None when not known, or when nothing limits memory by cgroup
    limits: tuple[CgroupRoom, ...] | None
    limits_failed: bool  # these could not be read, or not all of them

    def limits_of(self, program: Program, *, live: bool) -> tuple[CgroupRoom, ...]:
        """Return the limits of all cgroups above a program; where not all are known, also one that is not.

        Those of a program that is ``live`` are read on every device; of another one only those that it had
        then.
        """
        limits = self.limits or ()
        if program.limited_by is None:
            return (CgroupRoom("", None, None),) if self.limits is not None or self.limits_failed else ()
        read = {each.cgroup for each in limits}
        unread = [cgroup for cgroup in program.limited_by if cgroup not in read]
        if live and self.limits is not None:
            unread = []
        elif any(each.cgroup not in program.limited_by for each in limits):
            unread.append("")
        if self.limits_failed and not unread:
            unread.append("")
        return (
            *(each for each in limits if each.cgroup in program.limited_by),
            *(CgroupRoom(cgroup, None, None) for cgroup in unread),
        )


class LedgerSample(NamedTuple):
    """One sample: the devices, and what is seen of each holder on them."""

    devices: tuple[OfferedDevice, ...]
    programs: Mapping[int, Program]
    uses: Mapping[int, tuple[DeviceUse, ...]]
    failure: str


def _told(value: Any) -> Any:  # noqa: ANN401 JSON
    """Return JSON with short texts that are safe to print, and without null, which is as good as absent."""
    if isinstance(value, str):
        return printable(value[:_MAX_TEXT])
    if isinstance(value, Mapping):
        return {name: _told(each) for name, each in value.items() if each is not None}
    return list(map(_told, value)) if isinstance(value, list) else value


def read_ledger(raw: object, where: str) -> LedgerSample:
    """Read a ledger. Raises RecordingError if it is not one."""
    what = "what 'vramledger show --json' of this version prints"
    ledger = _read(raw, _LedgerSeen, where, what)
    if ledger.version != JSON_VERSION:
        raise RecordingError(f"{where} is not {what}")
    devices: list[OfferedDevice] = []
    programs: dict[int, Program] = {}
    uses: dict[int, list[DeviceUse]] = {}
    listed = [each for each in ledger.devices if not each.divided]
    for device in listed:
        if device.memory_counted_under in ("", device.uuid):
            # Compute instances of one GPU instance share its memory, which counts once.
            sharing = [each for each in listed if each.memory_counted_under == device.uuid != each.uuid]
            devices.append(_device(device, [device, *sharing]))
        for holding in device.holdings:
            owner = holding.owner.get("type", ""), holding.owner.get("name", "")
            owner = owner if owner[0] else ("user", holding.user)
            programs[holding.pid] = Program(
                holding.pid,
                holding.command,
                owner if owner[1] else ("", ""),
                holding.started,
                holding.limited_by,
            )
            uses.setdefault(holding.pid, []).append(_use(device, holding, ledger.watched_since))
    return LedgerSample(
        tuple(devices),
        programs,
        {pid: tuple(found) for pid, found in uses.items()},
        "" if ledger.up else ledger.failure.get("message") or "there is no sample yet",
    )


def _name(device: _DeviceSeen) -> str:
    profile, name = device.mig_profile, device.name or "a GPU of unknown name"
    if not profile:
        return name
    full = name if profile in name else f"{name} MIG {profile}"
    return f"{full} {device.uuid}"


def _capacity(device: _DeviceSeen) -> int | None:
    memory = device.memory
    return None if memory is None or memory.total is None else memory.total - memory.driver_reserved


def _device(device: _DeviceSeen, sharing: Sequence[_DeviceSeen]) -> OfferedDevice:
    """Return a device with the holdings and the limits of all that share its memory."""
    problem = ""
    if not device.up:
        problem = f"it does not answer ({device.error or 'no reason given'})"
    elif device.memory is None:
        problem = "it reports no memory of its own"
    holdings: dict[int, int] = {}
    evictable: dict[int, Evictable] = {}
    for holding in (held for each in sharing for held in each.holdings):
        holdings[holding.pid] = holdings.get(holding.pid, 0) + (holding.held or 0)
        found = _evictable(holding)
        if found is not None:
            evictable[holding.pid] = found
    limits = [each.cgroup_limits for each in sharing if each.cgroup_limits is not None]
    return OfferedDevice(
        device.uuid,
        device.gpu,
        _name(device),
        None if problem else _capacity(device),
        None if problem or device.memory is None else device.memory.free,
        problem,
        holdings,
        evictable,
        device.schedulers,
        tuple((str(each.get("owner_type", "")), str(each.get("owner", ""))) for each in device.reservations),
        tuple(CgroupRoom(each.cgroup, each.maximum, each.used) for known in limits for each in known)
        if limits
        else None,
        limits_failed=any(each.cgroup_limits_failed for each in sharing),
    )


def _evictable(holding: _HoldingSeen) -> Evictable | None:
    """Return what a holder could give: all if it does not work, otherwise the cache of its framework."""
    pid, state = holding.pid, holding.state
    if holding.held and holding.wasted and state in EVICTABLE_STATES:
        what = f"{state} pid {pid} ({holding.grade})"
        return Evictable(holding.held, what, f"vramledger end --pid {pid}")
    cached = sum(each.reclaimable for each in holding.agent.frameworks)
    if cached and "reclaim" in holding.agent.consents:
        return Evictable(cached, f"the cache of pid {pid}", f"vramledger reclaim {pid}")
    return None


def _use(device: _DeviceSeen, holding: _HoldingSeen, watched_since: float | None) -> DeviceUse:
    agent, started = holding.agent, holding.started
    peak, held = holding.peak, holding.held
    alone = len(device.holdings) == 1 and not device.blind
    oom = agent.last_oom if agent.last_oom and agent.last_oom.on_this_device is not False else None
    return DeviceUse(
        uuid=device.uuid,
        gpu=device.gpu,
        name=_name(device),
        capacity=_capacity(device),
        held=held,
        peak=held if peak is None else max(peak + holding.uncharged.least, held or 0),
        overhead=agent.overhead,
        framework=holding.framework,
        policy=holding.policy,
        frameworks=tuple(_framework(each) for each in agent.frameworks),
        whole_life=started is not None and watched_since is not None and started >= watched_since,
        time_busy=_busy(device.utilization) if alone else None,  # a row beside others is the device's figure
        sm_busy=_busy(device.activity.get("sm")) if alone else None,
        failed=oom is not None,
        failed_request=None if oom is None else oom.requested,
    )


def _busy(share: float | None) -> Busy | None:
    return None if share is None else Busy(share, share, 1)


def _framework(seen: _FrameworkSeen) -> FrameworkUse:
    settings = {  # those that have a form which we know
        name: text
        for name, form in ALLOCATOR_SETTINGS.items()
        if re.fullmatch(form, text := seen.settings.get(name, ""))
    }
    advice = allocator_advice(seen.reserved, seen.inactive_split, settings) or ""
    return FrameworkUse(seen.framework, seen.ordinal, seen.in_use_peak, seen.pool, advice)


def read_oom_report(raw: object, where: str) -> tuple[Program, tuple[DeviceUse, ...]]:
    """Read an out-of-memory report as what was seen of a program. Raises RecordingError if it is none."""
    what = "an out-of-memory report"
    report = _read(raw, _ReportSeen, where, what)
    name = report.framework
    declared = REPORTING_FRAMEWORKS.get(name)
    if declared is None:
        raise RecordingError(f"{where} is not {what}")
    told = {each: report.pool[each] for each in declared.figures if each in report.pool}
    general = declared.general_figures(_read(told, dict[str, Count], f"{where}: pool", "bytes by figure"))
    reserved = general.get("pool")
    held = next((each.bytes for each in report.device.holders if each.its_own), None)
    return Program(report.pid), (
        DeviceUse(
            uuid=report.device.uuid,
            gpu=report.device.gpu,
            name=report.device.name or "the device where it failed",
            capacity=None if report.limited else report.capacity,
            held=held,
            peak=held,
            overhead=None if held is None or reserved is None or reserved > held else held - reserved,
            framework=name,
            policy="",
            frameworks=(FrameworkUse(name, report.ordinal, general.get("in_use_peak"), reserved),),
            whole_life=False,
            failed=True,
            failed_request=report.requested,
            used_at_failure=general.get("in_use"),
        ),
    )
