"""Join agents' reports to the holders of a sample, by identity and device by device.

A figure counts only for the process that the kernel attested, where the driver lists it, and while the
agent's user is /proc's.

Translate a framework's device numbers to UUIDs, without asking CUDA.

A process numbers the devices that it sees from 0, in the order that CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER give. In a container or a job it sees only the devices that were assigned to it. The driver
tells us how many bytes the process holds on each device. We translate a number only where both facts together
leave one possible device: a figure on the wrong device is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vramledger.accounting.holders.processes import ProcessTracker, TrackedProcess
from vramledger.accounting.sample import Sample, forget_ended
from vramledger.model.agent_report import Agent, AgentReport, DeviceReport, FrameworkReport, GarbageReport
from vramledger.model.reading import DeviceReading, ProcessFacts, Reading
from vramledger.model.snapshot import AgentSnapshot, Holding, Policy, Pool
from vramledger_agent.protocol.frameworks import COUNTER_FIGURES, FRAMEWORKS_BY_NAME, REPORTING_FRAMEWORKS
from vramledger_agent.protocol.messages import ENABLE_VARIABLE, MAX_PROVIDERS

SLACK = 64 * 2**20
"""Bytes by which a report may exceed NVML's figure: the two are read up to a few seconds apart."""


def translate(
    wanted: Mapping[int, int],
    held: Mapping[str, int | None],
    visible: Mapping[str, str | None] | None,
    devices: Sequence[DeviceReading],
    *,
    apart: bool,
) -> dict[int, str]:
    """Return the UUIDs of those ordinals that are certain.

    ``apart``: the process may see fewer devices than we do, so its numbers may differ from ours.
    """
    wanted = {ordinal: least for ordinal, least in wanted.items() if least > 0}
    order = _enumerate(visible, devices, apart=apart)
    if order.known is not None and all(ordinal < len(order.known) for ordinal in wanted):
        found = {ordinal: order.known[ordinal] for ordinal in wanted}
        if all(_fits(wanted[ordinal], uuid, held) for ordinal, uuid in found.items()):
            return found
    # Otherwise its numbers differ from ours: a device cgroup that we cannot see, or the framework's own
    # choice.
    if order.rank is not None and (not order.rank or all(ordinal < len(order.rank) for ordinal in wanted)):
        ranks = {ordinal: order.rank[ordinal] if order.rank else ordinal for ordinal in wanted}
        inward = {device.uuid: held[device.uuid] for device in devices if device.uuid in held}
        return _monotone(sorted(wanted, key=ranks.__getitem__), wanted, inward)
    return _only(wanted, held)


class _Order(NamedTuple):
    """How a process numbers devices.

    ``known`` are the UUIDs in its order, None when they are not certain. ``rank`` are places in the order of
    PCI addresses, by ordinal: empty when they are the same as the ordinals, None when that is not certain
    either.
    """

    known: list[str] | None
    rank: list[int] | None


_UNKNOWN = _Order(None, None)


def _enumerate(
    visible: Mapping[str, str | None] | None, devices: Sequence[DeviceReading], *, apart: bool
) -> _Order:
    if visible is None:
        return _UNKNOWN
    whole = [device for device in devices if device.parent is None]
    # FASTEST_FIRST, the default, puts the fastest device first and does not define the order of the others.
    alike = len({device.name for device in whole}) <= 1 or visible.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    numbered = alike and not any(device.divided for device in whole)
    text = visible.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        if not numbered:
            return _UNKNOWN
        return _Order(None if apart else [device.uuid for device in whole], [])
    known, rank = _listed(text, devices, None if apart else whole)
    if not rank:
        return _Order(known, None)
    mixed = len(known) > (0 if apart else len(rank))
    twice = len(set(rank)) < len(rank)  # CUDA makes no device of an entry that is listed twice
    if mixed or twice or not numbered:
        return _UNKNOWN
    return _Order(None if apart else known, rank)


def _listed(
    text: str, devices: Sequence[DeviceReading], whole: Sequence[DeviceReading] | None
) -> tuple[list[str], list[int]]:
    """Return the UUIDs and the numbers in a list; the numbers as UUIDs too where ``whole`` is known."""
    known: list[str] = []
    rank: list[int] = []
    for token in (part.strip() for part in text.split(",")):
        if token.startswith(("GPU-", "MIG-")):
            uuid = _whole_uuid(token, devices)
            if uuid is None:
                break
            known.append(uuid)
        elif token.isascii() and token.isdigit() and (whole is None or int(token) < len(whole)):
            rank.append(int(token))
            if whole is not None:
                known.append(whole[rank[-1]].uuid)
        else:
            break  # -1, empty, or not a device: CUDA sees only the devices before it
    return known, rank


def _whole_uuid(token: str, devices: Sequence[DeviceReading]) -> str | None:
    """Return the one device whose UUID begins like this; CUDA accepts the beginning of a UUID."""
    found = [device.uuid for device in devices if device.uuid.startswith(token)]
    return found[0] if len(found) == 1 else None


def _fits(least: int, uuid: str, held: Mapping[str, int | None]) -> bool:
    if uuid not in held:
        return False
    bytes_ = held[uuid]
    return bytes_ is None or least <= bytes_ + SLACK


def _monotone(
    ordinals: Sequence[int], wanted: Mapping[int, int], held: Mapping[str, int | None]
) -> dict[int, str]:
    """Translate numbers whose order is known; one is certain if only one device is possible for it."""
    uuids = list(held)
    first = _leftmost(ordinals, uuids, wanted, held)
    last = _leftmost(ordinals[::-1], uuids[::-1], wanted, held)
    if first is None or last is None:
        return {}
    return {ordinal: uuid for ordinal, uuid in first.items() if last[ordinal] == uuid}


def _leftmost(
    ordinals: Sequence[int], uuids: Sequence[str], wanted: Mapping[int, int], held: Mapping[str, int | None]
) -> dict[int, str] | None:
    places: dict[int, str] = {}
    left = iter(uuids)
    for ordinal in ordinals:
        uuid = next((each for each in left if _fits(wanted[ordinal], each, held)), None)
        if uuid is None:
            return None
        places[ordinal] = uuid
    return places


def _only(wanted: Mapping[int, int], held: Mapping[str, int | None]) -> dict[int, str]:
    """Translate numbers whose order is not known: a number that fits only one device means that device."""
    places: dict[int, str] = {}
    left = dict(held)
    todo = dict(wanted)
    while True:
        found = {
            ordinal: fitting[0]
            for ordinal, least in todo.items()
            if len(fitting := [uuid for uuid in left if _fits(least, uuid, left)]) == 1
        }
        if not found or len(set(found.values())) < len(found):
            return places
        places.update(found)
        for ordinal, uuid in found.items():
            del left[uuid], todo[ordinal]


MISSING_AFTER = 30.0
"""Seconds after which a holder that was started with an agent should have sent a report."""

DEGRADED_FOR = 60.0
"""Seconds for which an agent counts as degraded after a failure of one of its parts."""

_POLICIES = {"async": "cuda_malloc_async"}

_REPORTED_LIBRARIES = frozenset(
    library.name
    for framework in REPORTING_FRAMEWORKS.values()
    for library in framework.libraries
    if not library.weak
)
"""Libraries on which an agent can report; a program that uses none of them has nothing to report."""

Identity = tuple[int, int]


class AgentHistory(msgspec.Struct, omit_defaults=True):
    """What one process' agent has reported.

    ``counts`` hold, for each counter, its newest value as reported and the value that is published. A counter
    that restarts in the process (an agent started again, statistics reset) goes on from the published value.
    ``errors`` are failures by provider. ``versions`` of agent and Python, and ``settings`` of allocators, are
    the first that it reported: they are labels, and a program must not be able to make a new series with each
    report.
    """

    counts: dict[str, tuple[int, int]] = {}
    errors: dict[str, int] = {}
    failed: float | None = None
    versions: tuple[str | None, str | None] | None = None
    settings: dict[str, Mapping[str, str]] = {}

    def with_first_versions(self, report: AgentReport) -> AgentReport:
        reported = report.agent, report.python
        if self.versions is None:
            self.versions = reported
        if self.versions == reported:
            return report
        return replace(report, agent=self.versions[0], python=self.versions[1])

    def with_first_settings(self, report: AgentReport) -> AgentReport:
        for each in report.frameworks:
            if each.settings:
                self.settings.setdefault(each.framework, each.settings)
        if all(each.settings == self.settings.get(each.framework, {}) for each in report.frameworks):
            return report
        frameworks = tuple(
            replace(each, settings=self.settings.get(each.framework, {})) for each in report.frameworks
        )
        return replace(report, frameworks=frameworks)

    def record_errors(self, reported: Mapping[str, int]) -> bool:
        """Record failures by provider, up to the number that one report may name; say whether any is new."""
        before = sum(self.errors.values())
        for name, count in reported.items():
            if name in self.errors or len(self.errors) < MAX_PROVIDERS:
                self.errors[name] = self.count_up(f"error {name}", count)
        return sum(self.errors.values()) > before

    def count_up(self, name: str, reported: int) -> int:
        """Record a counter; return it as one that never falls."""
        before, total = self.counts.get(name, (0, 0))
        total += reported - before if reported >= before else reported
        self.counts[name] = (reported, total)
        return total


class _Places(NamedTuple):
    """What the figures of a report were assigned to devices by: equal inputs give the same assignment."""

    # the figures; the same object where the report, or that part of it, came again
    frameworks: tuple[FrameworkReport, ...]
    visible: Mapping[str, str | None] | None  # the devices that the process sees
    held: Mapping[str, int | None]  # what it holds by device
    devices: tuple[tuple[object, ...], ...]  # what the devices are called and how they are divided
    apart: bool  # whether it may see fewer devices than we do

    def is_same(self, other: _Places) -> bool:
        """Tell whether both give the same assignment, without a look into the figures."""
        return self.frameworks is other.frameworks and self[1:] == other[1:]


class _Assigned(NamedTuple):
    """The figures of a report by device, with counters that never fall; and how many are of no device."""

    places: _Places
    pools: dict[str, tuple[Pool, ...]]
    unmapped: int


class AgentJoiner:
    """Join the reports of each sample to its holders. What is not in its state, each sample makes again."""

    def __init__(self, state: dict[int, dict[int, AgentHistory]]) -> None:
        self.state = state
        self._held: dict[int, dict[str, int | None]] = {}
        self._assigned: dict[Identity, _Assigned] = {}
        self._devices: tuple[tuple[object, ...], ...] = ()
        self.agents: dict[int, AgentSnapshot] = {}

    def join(self, sample: Sample, processes: ProcessTracker) -> None:
        reading = sample.reading
        starts = {pid: row.start for pid, row in sample.rows.items()}
        self._held = _held_bytes(reading) if reading.agents else {}
        self._devices = tuple((each.uuid, each.name, each.parent, each.divided) for each in reading.devices)
        joined: dict[int, AgentSnapshot] = {}
        for agent in reading.agents:
            if starts.get(agent.pid) == agent.start:  # otherwise NVML lists another process under this pid
                facts = processes.facts_of(agent.pid, agent.start)
                joined[agent.pid] = self._join_agent(agent, reading, facts, processes)
        if reading.agent_socket is not None and reading.agent_socket.listening:
            for pid, start in starts.items():
                if pid not in joined and _is_missing(processes.get(pid, start), reading.time):
                    joined[pid] = AgentSnapshot(
                        up=False, problem="missing", why=f"{ENABLE_VARIABLE}=1 but it has not reported"
                    )
        self.agents = joined
        alive = set(starts.items())
        forget_ended(self.state, lambda pid, start: (pid, start) in alive)
        for identity in [each for each in self._assigned if each not in alive]:
            del self._assigned[identity]

    def policy(self, pid: int, outside: Policy) -> Policy | None:
        """Return what the agent says about a framework's policy, None to judge it from outside.

        A server that manages the pool of the framework below it knows more than that framework.
        """
        agent = self.agents.get(pid)
        if agent is None or agent.report is None:
            return None
        reported = [each for each in agent.report.frameworks if each.policy is not None]
        known = FRAMEWORKS_BY_NAME.get(outside.framework)
        if not reported or (known is not None and known.serves):
            return None
        largest = max(reported, key=lambda each: sum(_least(each, device) for device in each.devices))
        policy = str(largest.policy)
        with_ = f" with allocator {largest.allocator}" if largest.allocator else ""
        return Policy(
            largest.framework, _POLICIES.get(policy, policy), "agent", f"reported by its agent{with_}"
        )

    def _join_agent(
        self, agent: Agent, reading: Reading, facts: ProcessFacts | None, processes: ProcessTracker
    ) -> AgentSnapshot:
        report = agent.report
        if facts is not None and facts.uid is not None and facts.uid != agent.uid:
            why = f"it connected as uid {agent.uid}, and the process belongs to uid {facts.uid}"
            return AgentSnapshot(up=False, problem="foreign", why=why)
        if agent.problem or report is None:
            refused = agent.problem == "refused"
            why = "its reports have a wrong format" if refused else "it is connected but sends no reports"
            problem = agent.problem or "silent"
            return AgentSnapshot(up=False, problem=problem, why=why, received=agent.received)
        if report.rank is not None:
            processes.record_rank(agent.pid, agent.start, report.rank)
        histories = self.state.setdefault(agent.pid, {})
        history = histories.setdefault(agent.start, AgentHistory())
        report = history.with_first_settings(history.with_first_versions(report))
        if history.record_errors(report.errors):
            history.failed = reading.monotonic
        degraded = history.failed is not None and reading.monotonic - history.failed < DEGRADED_FOR
        apart = _is_isolated(facts)
        assigned = self._assign(agent, history, report, reading, apart=apart)
        garbage = report.collector or GarbageReport(None, None)
        return AgentSnapshot(
            up=not degraded,
            problem="degraded" if degraded else "",
            why=f"parts of it fail: {', '.join(sorted(history.errors))}" if degraded else "",
            received=agent.received,
            report=report,
            pools=assigned.pools,
            unmapped=assigned.unmapped,
            errors=dict(history.errors),
            dropped=_count_up(history, "dropped", report.dropped),
            collections=_count_up(history, "collections", garbage.collections),
        )

    def _assign(
        self, agent: Agent, history: AgentHistory, report: AgentReport, reading: Reading, *, apart: bool
    ) -> _Assigned:
        """Assign a report's figures to devices."""
        identity, held = (agent.pid, agent.start), self._held.get(agent.pid, {})
        places = _Places(report.frameworks, report.visible, held, self._devices, apart)
        known = self._assigned.get(identity)
        if known is not None and known.places.is_same(places):
            return known  # the same figures: nothing was counted since
        pools, unmapped = _pools_by_device(report, held, reading, apart=apart)
        counted = {
            uuid: tuple(_counted(pool, history, uuid) for pool in found) for uuid, found in pools.items()
        }
        assigned = self._assigned[identity] = _Assigned(places, counted, unmapped)
        return assigned


def overhead(agent: AgentSnapshot, uuid: str, holding: Holding) -> int | None:
    """Return held minus taken bytes; None if unknown or contradictory: managed pools may lie on the host."""
    pool = agent.pool(uuid)
    if pool is None or holding.held is None or pool > holding.held:
        return None
    return holding.held - pool


def needed(agent: AgentSnapshot, uuid: str, holding: Holding) -> int | None:
    """Return the highest memory need of a process on a device, None where a part of it is not known."""
    need, rest = agent.need(uuid), overhead(agent, uuid, holding)
    return None if need is None or rest is None else need + rest


def _is_missing(process: TrackedProcess | None, now: float) -> bool:
    if process is None or now - process.shown.start_time <= MISSING_AFTER:
        return False
    facts = process.now
    able = not _REPORTED_LIBRARIES.isdisjoint(facts.libraries or ())
    return able and dict(facts.settings).get(ENABLE_VARIABLE) == "1"


def _count_up(history: AgentHistory, name: str, reported: int | None) -> int | None:
    return None if reported is None else history.count_up(name, reported)


def _counted(pool: Pool, history: AgentHistory, uuid: str) -> Pool:
    counts = {
        name: history.count_up(f"{pool.framework} {uuid} {name}", pool.figures[name])
        for name in COUNTER_FIGURES
        if name in pool.figures
    }
    if counts.items() <= pool.figures.items():  # as reported, which is the usual case
        return pool
    return pool._replace(figures={**pool.figures, **counts})


def _pools_by_device(
    report: AgentReport, held: Mapping[str, int | None], reading: Reading, *, apart: bool
) -> tuple[dict[str, list[Pool]], int]:
    pools: dict[str, list[Pool]] = {}
    unmapped = 0
    for framework in report.frameworks:
        wanted = {
            each.ordinal: _least(framework, each)
            for each in framework.devices
            if each.uuid is None and each.ordinal is not None
        }
        places = translate(wanted, held, report.visible, reading.devices, apart=apart)
        for each in framework.devices:
            uuid = each.uuid if each.ordinal is None or each.uuid is not None else places.get(each.ordinal)
            if uuid is not None and uuid in held:
                pool = Pool(framework.framework, each.ordinal, each.figures, each.categories, each.managed)
                pools.setdefault(uuid, []).append(pool)
            elif _least(framework, each) > 0:
                unmapped += 1
    return pools, unmapped


def _least(framework: FrameworkReport, device: DeviceReport) -> int:
    """Return the smallest number of bytes that a framework can hold on a device, by its report."""
    general = REPORTING_FRAMEWORKS[framework.framework].general_figures(device.figures)
    return max(general.get("pool", 0), general.get("in_use", 0))


def _held_bytes(reading: Reading) -> dict[int, dict[str, int | None]]:
    """Return the bytes that a process can have at most, by pid and device: charged, and mapped as managed.

    A GPU in MIG mode lists the bytes of its instances a second time.
    """
    mapped = {each.pid: each.bound or 0 for each in reading.managed}
    held: dict[int, dict[str, int | None]] = {}
    for device in reading.devices:
        if not device.divided:
            for entry in device.processes or ():
                most = None if entry.memory is None else entry.memory + mapped.get(entry.pid, 0)
                held.setdefault(entry.pid, {})[device.uuid] = most
    return held


def _is_isolated(facts: ProcessFacts | None) -> bool:
    """Tell whether a process may see other devices than we do, as in a container or a Slurm job."""
    if facts is None or len(facts.nspid) > 1:
        return True
    owner = facts.owner
    return owner is not None and bool(owner.pod or owner.container or owner.slurm_job)
