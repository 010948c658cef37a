"""Make the public ledger of a snapshot: what ``/api/v1/ledger`` serves and ``show --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

from vramledger.accounting.agent_figures import needed, overhead
from vramledger.model import public_ledger as public
from vramledger.model.agent_report import FrameworkReport, OutOfMemory
from vramledger.model.reading import ProcessFacts
from vramledger.model.records import JSON_VERSION, read_record, write_record
from vramledger.model.snapshot import AgentSnapshot, DeviceSnapshot, Holding, Pool, Snapshot
from vramledger.readers.hosts.system_memory import chain_of
from vramledger.readers.owners.cgroups import unified_path
from vramledger.verdicts.remedies import about_hidden, about_operating_system, about_unattributed, remedy
from vramledger.views.timeline import HoldingGrowth, Key
from vramledger_agent.protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS

_Public = TypeVar("_Public", bound=msgspec.Struct)

_NO_GROWTH: Mapping[Key, HoldingGrowth] = {}


def ledger_text(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth] = _NO_GROWTH) -> bytes:
    """Return a snapshot as JSON in a line."""
    return msgspec.json.encode(public_ledger(snapshot, growth)) + b"\n"


def snapshot_json(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth] = _NO_GROWTH) -> dict[str, Any]:
    """Return a snapshot as JSON values."""
    found: dict[str, Any] = msgspec.to_builtins(public_ledger(snapshot, growth))
    return found


def public_ledger(
    snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth] = _NO_GROWTH
) -> public.PublicLedger:
    """Return a snapshot as the public sees it, with what is known of its holdings' ``growth``."""
    return _made(
        public.PublicLedger,
        snapshot,
        version=JSON_VERSION,
        failure=None if snapshot.failure is None else public.Failure(*snapshot.failure),
        devices=[_device(device, snapshot, growth) for device in snapshot.devices],
    )


def _made(kind: type[_Public], *sources: object, **others: object) -> _Public:
    """Return a public record: what it has under a name of one of the sources is that, unless it is given."""
    for name in kind.__struct_fields__:
        if name not in others:
            others[name] = next(getattr(each, name) for each in sources if hasattr(each, name))
    return kind(**others)


def _device(
    device: DeviceSnapshot, snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth]
) -> public.PublicDevice:
    reading, reserved = device.reading, device.reservation_status
    return _made(
        public.PublicDevice,
        device,
        reading,
        gpu=reading.index,
        parent_uuid=reading.parent,
        memory_kind=reading.memory_kind or (None if reading.memory is None else "dedicated"),
        node=None if reading.node is None else public.Node(**reading.node._asdict()),
        memory=None
        if device.ledger is None
        else _made(
            public.Memory,
            device.ledger,
            device,
            states=public.StateBytes(**{state.value: held for state, held in device.ledger.states.items()}),
        ),
        utilization=None if reading.utilization is None else reading.utilization.get("gpu"),
        activity=None if reading.activity is None else dict(reading.activity),
        about_unattributed=about_unattributed(device),
        about_operating_system=about_operating_system(device),
        undivided=None
        if device.undivided is None
        else public.Undivided(device.undivided.bytes, list(device.undivided.pids), device.undivided.state),
        left_behind=[
            public.LeftBehind(each.pid, each.user, each.ended, each.least, each.most, list(each.pids))
            for each in device.left
        ],
        holdings=[
            public_holding(holding, device, snapshot, growth.get((reading.uuid, holding.pid, holding.start)))
            for holding in device.holdings
        ],
        reservations=None
        if reserved is None
        else [
            public.PublicReservation(each.type, each.name, each.scheduler, each.held)
            for each in reserved.reservations
        ],
        limits=[public.PublicLimit(**each._asdict()) for each in device.limits],
        cgroup_limits=None
        if reading.limits is None
        else [
            public.PublicCgroupLimit(each.cgroup, each.maximum, each.current)
            for each in reading.limits
            if each.maximum is not None
        ],
        cgroup_limits_failed="limits" in reading.failed,
        schedulers=[] if reserved is None else list(reserved.schedulers),
        owners=None if device.owner_usage is None else device.owner_usage.holding,
        hidden=None
        if device.hidden is None
        else [
            public.Hidden(each.pid, each.kind, each.command, each.user, about_hidden(each.kind))
            for each in device.hidden
        ],
    )


def public_holding(
    holding: Holding, device: DeviceSnapshot, snapshot: Snapshot, growth: HoldingGrowth | None = None
) -> public.PublicHolding:
    """Return one holding of a device as the public sees it."""
    process = snapshot.processes.get(holding.pid)
    facts = snapshot.facts_of(holding.pid)
    policy = process.policy if process is not None and facts is not None else None
    labels = None if facts is None else snapshot.pod_labels_of(facts.owner)
    cache = snapshot.kv_caches.get(holding.pid)
    reserved = device.reservation_status
    return _made(
        public.PublicHolding,
        holding,
        user=facts.user if facts is not None else None,
        owner=None if facts is None or facts.owner is None else public.PublicOwner(**facts.owner._asdict()),
        pod_labels=None if labels is None else dict(labels),
        command=facts.command if facts is not None else None,
        framework=policy.framework if policy is not None else None,
        policy=policy.policy if policy is not None else None,
        policy_source=policy.source if policy is not None else None,
        policy_why=policy.why if policy is not None else None,
        started=process.start_time if process is not None else None,
        uncharged=None if holding.uncharged is None else public.Uncharged(**holding.uncharged._asdict()),
        kv_cache=None if cache is None else public.PublicKvCache(*cache[2:]),
        sm_utilization=holding.sm,
        quiet_since=holding.quiet_since if holding.evidence else None,
        growth=None if growth is None else public.Growth(*growth),
        what_to_do=remedy(holding, process, device),
        unreserved=None
        if reserved is None or reserved.unreserved_pids is None
        else holding.pid in reserved.unreserved_pids,
        limited_by=_limited_by(snapshot, facts),
        agent=_agent(snapshot.agents.get(holding.pid), device.reading.uuid, holding),
    )


def _limited_by(snapshot: Snapshot, facts: ProcessFacts | None) -> list[str] | None:
    """Return the cgroups of a process, with those above them, that have a limit on any device."""
    place = None if facts is None or facts.cgroup is None else unified_path(facts.cgroup)
    if place is None:
        return None
    limits = (each for device in snapshot.devices for each in device.reading.limits or ())
    limited = {each.cgroup for each in limits if each.maximum is not None}
    return [cgroup for cgroup in chain_of(place) if cgroup in limited]


def _agent(agent: AgentSnapshot | None, uuid: str, holding: Holding) -> public.PublicAgent | None:
    """Return what the holder's agent reports about one device; never the paths that it names."""
    if agent is None:
        return None
    report = agent.report
    reported = {each.framework: each for each in report.frameworks} if report is not None else {}
    oom = report.last_oom if report is not None else None
    return public.PublicAgent(
        up=agent.up,
        problem=agent.problem or None,
        why=agent.why or None,
        received=agent.received,
        version=report.agent if report is not None else None,
        consents=list(report.consents) if report is not None else [],
        overhead=overhead(agent, uuid, holding),
        needed_peak=needed(agent, uuid, holding),
        frameworks=[
            _framework(pool, reported.get(pool.framework, FrameworkReport("")))
            for pool in agent.pools.get(uuid, ())
        ],
        last_oom=None
        if oom is None
        else _made(public.LastOom, oom, on_this_device=_failed_here(agent, uuid, oom)),
    )


def _framework(pool: Pool, reported: FrameworkReport) -> object:
    return public.FrameworkPool(
        framework=pool.framework,
        title=REPORTING_FRAMEWORKS[pool.framework].title,
        ordinal=pool.ordinal,
        categories=public.Categories(**pool.categories),
        settings=public.Settings(**reported.settings),
        pinned=reported.pinned,
        pinned_in_use=reported.pinned_in_use,
        **{**pool.figures, **dict.fromkeys(POOL_FIGURES), **pool.general},
    )


def _failed_here(agent: AgentSnapshot, uuid: str, oom: OutOfMemory) -> bool | None:
    """Tell whether an allocation failed on this device; None when that is not known."""
    ordinals = [pool.ordinal for pool in agent.pools.get(uuid, ()) if pool.framework == oom.framework]
    if oom.ordinal is None or not ordinals or None in ordinals:
        return None
    return oom.ordinal in ordinals


class LedgerAnswer(NamedTuple):
    """The exporter's newest snapshot, and the growth of its holdings as the page shows it."""

    snapshot: Snapshot
    growth: tuple[tuple[Key, HoldingGrowth], ...] = ()


def write_answer(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth]) -> bytes:
    """Return the text of an answer."""
    return write_record(LedgerAnswer(snapshot, tuple(growth.items())))


def read_answer(text: bytes) -> LedgerAnswer:
    """Read an answer. Raises RecordError if it is not an answer of this version."""
    return read_record(text, LedgerAnswer)
