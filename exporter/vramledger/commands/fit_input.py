"""Read what was seen of a program and of the GPUs: from ledgers as JSON, and from an out-of-memory report.

A ledger is what ``vramledger show --json`` prints, and what the exporter serves; a recording and a running
exporter give the same. The files may come from anybody, so each value is checked when it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import NamedTuple

from vramledger.agent_protocol.frameworks import FRAMEWORKS_BY_NAME, REPORTING_FRAMEWORKS
from vramledger.agent_protocol.messages import ALLOCATOR_SETTINGS
from vramledger.errors import RecordingError
from vramledger.model.json_values import JSON_VERSION
from vramledger.printable import printable
from vramledger.views.remedies import allocator_advice

EVICTABLE_STATES = ("idle", "orphaned", "stopped", "zombie")
"""The states of a wasted holding that ``vramledger end`` ends; a dead or stuck one needs a reset."""

_MAX_TEXT = 300


class Fields:
    """An object of a JSON document, whose values are checked when they are read; absent means not known.

    Every method raises RecordingError if the value has another type.
    """

    def __init__(self, raw: object, where: str) -> None:
        if not isinstance(raw, Mapping):
            message = f"{where} is not a JSON object"
            raise RecordingError(message)
        self._raw = raw
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._raw.get(name) is not None

    def _wrong(self, name: str, kind: str) -> RecordingError:
        shown = printable(f"{self._raw[name]!r:.40}")
        return RecordingError(f"{self._where}: {name} is {shown}, and not {kind}")

    def count(self, name: str) -> int | None:
        """Return a whole number of 0 or more."""
        value = self._raw.get(name)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise self._wrong(name, "a whole number of 0 or more")
        return value

    def number(self, name: str) -> float | None:
        """Return a finite number of 0 or more."""
        value = self._raw.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number")
        if not isfinite(value) or value < 0:
            raise self._wrong(name, "a finite number of 0 or more")
        return float(value)

    def text(self, name: str) -> str:
        """Return a text that is safe to print; empty if it is not known."""
        value = self._raw.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return printable(value[:_MAX_TEXT])

    def flag(self, name: str) -> bool | None:
        """Return a boolean."""
        value = self._raw.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def child(self, name: str) -> Fields:
        """Return an object; an empty one if it is not known."""
        value = self._raw.get(name)
        return Fields({} if value is None else value, f"{self._where}.{name}")

    def children(self, name: str) -> list[Fields]:
        """Return a list of objects; an empty one if it is not known."""
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return [Fields(each, f"{self._where}.{name}[{number}]") for number, each in enumerate(value)]

    def texts(self, name: str) -> list[str]:
        """Return a list of texts that are safe to print; an empty one if it is not known."""
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(name, "a list of texts")
        return [printable(each[:_MAX_TEXT]) for each in value]


class FrameworkUse(NamedTuple):
    """What one framework of the program reported on one device, in bytes; None means not known.

    Attributes:
        name: as it is declared.
        ordinal: its own number of the device.
        in_use_peak: its highest use.
        pool: what it had taken from the driver.
        advice: what a setting of its allocator would free, otherwise empty.
    """

    name: str
    ordinal: int | None
    in_use_peak: int | None
    pool: int | None
    advice: str = ""

    @property
    def title(self) -> str:
        """Return its name as its makers write it."""
        declared = FRAMEWORKS_BY_NAME.get(self.name)
        return self.name if declared is None else declared.title


class DeviceUse(NamedTuple):
    """What was seen of the program on one device in one sample; bytes, None means not known.

    Attributes:
        uuid: of the device.
        gpu: its index.
        name: its product name.
        capacity: what programs can have of it, without the driver's reserve.
        held: what the program held, charged or not.
        peak: the highest of that so far.
        overhead: what it held outside the frameworks' pools.
        framework: the one that holds the memory.
        policy: how that takes memory.
        frameworks: those that reported.
        whole_life: it was watched since its start, so ``peak`` is the peak of its life.
        time_busy: the share of the time in which it had a kernel on the device.
        sm_busy: the share of the device's SMs that its kernels kept busy, by the device's own counters.
        failed: an allocation has failed here, or perhaps here.
        failed_request: bytes of its newest allocation that failed here.
        used_at_failure: what the framework had in use at that moment.
    """

    uuid: str
    gpu: int | None
    name: str
    capacity: int | None
    held: int | None
    peak: int | None
    overhead: int | None
    framework: str
    policy: str
    frameworks: tuple[FrameworkUse, ...]
    whole_life: bool
    time_busy: float | None = None
    sm_busy: float | None = None
    failed: bool = False
    failed_request: int | None = None
    used_at_failure: int | None = None


class Program(NamedTuple):
    """A program whose need is asked for.

    Attributes:
        pid: its process id.
        command: its name, empty when not known.
        owner: type and name of its owner, empty when not known.
        started: Unix time, None when not known; another program may get its pid later.
        limited_by: the cgroups above it that had a limit on any device; None when its cgroup is not known.
    """

    pid: int
    command: str = ""
    owner: tuple[str, str] = ("", "")
    started: float | None = None
    limited_by: tuple[str, ...] | None = None


class Evictable(NamedTuple):
    """Memory that its holder does not work with, or does not need: ``command`` says how it would be freed."""

    bytes: int
    what: str
    command: str


class CgroupRoom(NamedTuple):
    """What the programs in a cgroup may take of a device, bytes.

    Attributes:
        cgroup: its path; empty where it is not known whether the cgroup of the program has a limit.
        maximum: the limit; None when not known.
        used: what the cgroup has, with all below it; None when not known.
    """

    cgroup: str
    maximum: int | None
    used: int | None

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
    """A device on which a program may run.

    Attributes:
        uuid: of the device.
        gpu: its index.
        name: its product name, for a MIG instance with profile and UUID: several have the same index.
        capacity: what programs can have of it, without the driver's reserve; None when not known.
        free: what a program could take now; None when not known.
        problem: why nothing is known of its memory, otherwise empty.
        holdings: bytes held by each pid.
        evictable: what others hold without work, or have cached, by pid.
        schedulers: those that manage it.
        granted: type and name of the owners for whom it is reserved.
        limits: what cgroups with a limit may take; None when not known, or when nothing limits memory by
            cgroup.
        limits_failed: these could not be read, or not all of them.
    """

    uuid: str
    gpu: int | None
    name: str
    capacity: int | None
    free: int | None
    problem: str
    holdings: Mapping[int, int]
    evictable: Mapping[int, Evictable]
    schedulers: tuple[str, ...]
    granted: tuple[tuple[str, str], ...]
    limits: tuple[CgroupRoom, ...] | None
    limits_failed: bool

    def limits_of(self, program: Program, *, live: bool) -> tuple[CgroupRoom, ...]:
        """Return the limits of all cgroups above a program.

        Where it is not known which these are, or what they may take here, a limit that is not known is
        among them. The limits of a program that is ``live`` are read on every device, so where none is
        read it has none. Of another one only those cgroups are known that had a limit then and there.
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


def read_ledger(raw: object, where: str) -> LedgerSample:
    """Read a ledger.

    Raises:
        RecordingError: it is not one.
    """
    fields = Fields(raw, where)
    if "devices" not in fields or fields.count("version") != JSON_VERSION:
        message = f"{where} is not what 'vramledger show --json' of this version prints"
        raise RecordingError(message)
    watched_since = fields.number("watched_since")
    devices: list[OfferedDevice] = []
    programs: dict[int, Program] = {}
    uses: dict[int, list[DeviceUse]] = {}
    listed = [each for each in fields.children("devices") if not each.flag("divided")]
    for device in listed:
        uuid = device.text("uuid")
        if device.text("memory_counted_under") in ("", uuid):
            # Compute instances of one GPU instance share its memory, which counts once.
            sharing = [each for each in listed if each.text("memory_counted_under") == uuid]
            devices.append(
                _device(device, [device, *(each for each in sharing if each.text("uuid") != uuid)])
            )
        for holding in device.children("holdings"):
            pid = holding.count("pid") or 0
            owner = holding.child("owner")
            whom = (owner.text("type"), owner.text("name"))
            whom = whom if whom[0] else ("user", holding.text("user"))
            whom = whom if whom[1] else ("", "")
            programs[pid] = Program(
                pid,
                holding.text("command"),
                whom,
                holding.number("started"),
                tuple(holding.texts("limited_by")) if "limited_by" in holding else None,
            )
            uses.setdefault(pid, []).append(_use(device, holding, watched_since))
    failure = fields.child("failure")
    return LedgerSample(
        tuple(devices),
        programs,
        {pid: tuple(found) for pid, found in uses.items()},
        "" if fields.flag("up") else failure.text("message") or "there is no sample yet",
    )


def _name(device: Fields) -> str:
    profile = device.text("mig_profile")
    name = device.text("name") or "a GPU of unknown name"
    if not profile:
        return name
    full = name if profile in name else f"{name} MIG {profile}"
    return f"{full} {device.text('uuid')}"


def _capacity(device: Fields) -> int | None:
    memory = device.child("memory")
    total = memory.count("total")
    return None if total is None else total - (memory.count("driver_reserved") or 0)


def _limits(sharing: Iterable[Fields]) -> tuple[CgroupRoom, ...] | None:
    """Return the limits on devices that share their memory: all of them count."""
    known = [device for device in sharing if "cgroup_limits" in device]
    if not known:
        return None
    return tuple(
        CgroupRoom(raw.text("cgroup"), raw.count("maximum"), raw.count("used"))
        for device in known
        for raw in device.children("cgroup_limits")
    )


def _device(device: Fields, sharing: Sequence[Fields]) -> OfferedDevice:
    """Return a device with the holdings of all that share its memory."""
    problem = ""
    if not device.flag("up"):
        problem = f"it does not answer ({device.text('error') or 'no reason given'})"
    elif "memory" not in device:
        problem = "it reports no memory of its own"
    holdings: dict[int, int] = {}
    evictable: dict[int, Evictable] = {}
    for holding in (held for each in sharing for held in each.children("holdings")):
        pid = holding.count("pid") or 0
        holdings[pid] = holdings.get(pid, 0) + (holding.count("held") or 0)
        found = _evictable(pid, holding)
        if found is not None:
            evictable[pid] = found
    return OfferedDevice(
        device.text("uuid"),
        device.count("gpu"),
        _name(device),
        None if problem else _capacity(device),
        None if problem else device.child("memory").count("free"),
        problem,
        holdings,
        evictable,
        tuple(device.texts("schedulers")),
        tuple((each.text("owner_type"), each.text("owner")) for each in device.children("reservations")),
        _limits(sharing),
        limits_failed=any(bool(each.flag("cgroup_limits_failed")) for each in sharing),
    )


def _evictable(pid: int, holding: Fields) -> Evictable | None:
    """Return what a holder could give: all if it does not work, otherwise the cache of its framework."""
    held, state = holding.count("held"), holding.text("state")
    if held and holding.flag("wasted") and state in EVICTABLE_STATES:
        what = f"{state} pid {pid} ({holding.text('grade')})"
        return Evictable(held, what, f"vramledger end --pid {pid}")
    agent = holding.child("agent")
    cached = sum(each.count("reclaimable") or 0 for each in agent.children("frameworks"))
    if cached and "reclaim" in agent.texts("consents"):
        return Evictable(cached, f"the cache of pid {pid}", f"vramledger reclaim {pid}")
    return None


def _use(device: Fields, holding: Fields, watched_since: float | None) -> DeviceUse:
    agent = holding.child("agent")
    uncharged = holding.child("uncharged").count("least") or 0
    peak, held = holding.count("peak"), holding.count("held")
    started = holding.number("started")
    alone = len(device.children("holdings")) == 1 and not device.flag("blind")
    oom = agent.child("last_oom")
    failed = "last_oom" in agent and oom.flag("on_this_device") is not False
    return DeviceUse(
        uuid=device.text("uuid"),
        gpu=device.count("gpu"),
        name=_name(device),
        capacity=_capacity(device),
        held=held,
        peak=held if peak is None else max(peak + uncharged, held or 0),
        overhead=agent.count("overhead"),
        framework=holding.text("framework"),
        policy=holding.text("policy"),
        frameworks=tuple(_framework(each) for each in agent.children("frameworks")),
        whole_life=started is not None and watched_since is not None and started >= watched_since,
        time_busy=device.number("utilization") if alone else holding.number("sm_utilization"),
        sm_busy=device.child("activity").number("sm") if alone else None,
        failed=failed,
        failed_request=oom.count("requested") if failed else None,
    )


def _framework(raw: Fields) -> FrameworkUse:
    return FrameworkUse(
        raw.text("framework"),
        raw.count("ordinal"),
        raw.count("in_use_peak"),
        raw.count("pool"),
        allocator_advice(raw.count("reserved"), raw.count("inactive_split"), _settings(raw)) or "",
    )


def _settings(raw: Fields) -> dict[str, str]:
    """Return the settings of an allocator that have a form which we know."""
    found = {name: raw.child("settings").text(name) for name in ALLOCATOR_SETTINGS}
    return {name: text for name, text in found.items() if re.fullmatch(ALLOCATOR_SETTINGS[name], text)}


def read_oom_report(raw: object, where: str) -> tuple[Program, tuple[DeviceUse, ...]]:
    """Read an out-of-memory report as what was seen of the program on the device where it failed.

    Raises:
        RecordingError: it is not one.
    """
    fields = Fields(raw, where)
    pool = fields.child("pool")
    name = fields.text("framework")
    declared = REPORTING_FRAMEWORKS.get(name)
    if declared is None or "pool" not in fields:
        message = f"{where} is not an out-of-memory report"
        raise RecordingError(message)
    figures = {each: value for each in declared.figures if (value := pool.count(each)) is not None}
    general = declared.general_figures(figures)
    device = fields.child("device")
    reserved = general.get("pool")
    held = next((each.count("bytes") for each in device.children("holders") if each.flag("self")), None)
    return Program(fields.count("pid") or 0), (
        DeviceUse(
            uuid=device.text("uuid"),
            gpu=device.count("gpu"),
            name=device.text("name") or "the device where it failed",
            capacity=None if fields.flag("limited") else fields.count("capacity"),
            held=held,
            peak=held,
            overhead=None if held is None or reserved is None or reserved > held else held - reserved,
            framework=name,
            policy="",
            frameworks=(
                FrameworkUse(
                    name,
                    fields.count("ordinal"),
                    general.get("in_use_peak"),
                    reserved,
                ),
            ),
            whole_life=False,
            failed=True,
            failed_request=fields.count("requested"),
            used_at_failure=general.get("in_use"),
        ),
    )
