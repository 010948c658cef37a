"""Write a snapshot as JSON: what ``/api/v1/ledger`` serves and ``vramledger show --json`` prints.

Bytes, ratios and Unix seconds; null means not known.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.accounting.agent_figures import needed, overhead
from vramledger.agent_protocol.frameworks import POOL_FIGURES, REPORTING_FRAMEWORKS
from vramledger.model.agent_report import FrameworkReport, OutOfMemory
from vramledger.model.json_values import JSON_VERSION, Json
from vramledger.model.reading import ProcessFacts
from vramledger.model.snapshot import AgentSnapshot, DeviceSnapshot, Holding, Snapshot
from vramledger.readers.hosts.dmem import chain_of
from vramledger.readers.owners.cgroups import unified_path
from vramledger.views.remedies import about_hidden, about_operating_system, about_unattributed, remedy
from vramledger.views.timeline import HoldingGrowth, Key

_NO_GROWTH: Mapping[Key, HoldingGrowth] = {}


def snapshot_json(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth] = _NO_GROWTH) -> dict[str, Json]:
    """Return a snapshot as JSON values, with what is known of its holdings' ``growth``."""
    return {
        "version": JSON_VERSION,
        "up": snapshot.up,
        "failure": None
        if snapshot.failure is None
        else {"reason": snapshot.failure[0], "message": snapshot.failure[1]},
        "released_until": snapshot.released_until,
        "time": snapshot.time,
        "watched_since": snapshot.watched_since,
        "source": snapshot.source,
        "recording": snapshot.recording,
        "host_pid_namespace": snapshot.host_pid_namespace,
        "driver_version": snapshot.driver_version,
        "devices": [_device(device, snapshot, growth) for device in snapshot.devices],
    }


def _device(
    device: DeviceSnapshot, snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth]
) -> dict[str, Json]:
    reading, ledger = device.reading, device.ledger
    return {
        "gpu": reading.index,
        "uuid": reading.uuid,
        "name": reading.name,
        "mig_profile": reading.mig_profile,
        "mig_placement": reading.mig_placement,
        "parent_uuid": reading.parent,
        "memory_counted_under": device.memory_counted_under,
        "up": device.up,
        "error": reading.error,
        "memory_kind": reading.memory_kind or (None if reading.memory is None else "dedicated"),
        "addressing_mode": reading.addressing_mode,
        "virtualization": reading.virtualization,
        "node": None if reading.node is None else dict(reading.node._asdict()),
        "memory": None
        if ledger is None
        else {
            "total": ledger.total,
            "free": ledger.free,
            "driver_reserved": ledger.driver_reserved,
            "used": ledger.used,
            "used_peak": device.used_peak,
            "wasted": device.wasted,
            "operating_system": ledger.operating_system,
            "unattributed": ledger.unattributed,
            "uncharged": ledger.uncharged,
            "overlap": ledger.overlap,
            "states": {state.value: held for state, held in ledger.states.items()},
        },
        "utilization": None if reading.utilization is None else reading.utilization.get("gpu"),
        "activity": None if reading.activity is None else dict(reading.activity),
        "divided": reading.divided,
        "blind": device.blind,
        "ghost": device.ghost,
        "ghost_since": device.ghost_since,
        "about_unattributed": about_unattributed(device),
        "about_operating_system": about_operating_system(device),
        "undivided": None
        if device.undivided is None
        else {
            "bytes": device.undivided.bytes,
            "pids": list(device.undivided.pids),
            "state": device.undivided.state.value,
        },
        "left_behind": [
            {
                "pid": each.pid,
                "user": each.user,
                "ended": each.ended,
                "least": each.least,
                "most": each.most,
                "pids": list(each.pids),
            }
            for each in device.left
        ],
        "holdings": [
            holding_json(
                holding,
                device,
                snapshot,
                growth.get((reading.uuid, holding.pid, holding.start)),
            )
            for holding in device.holdings
        ],
        "reservations": None
        if device.reservation_status is None
        else [
            {"owner_type": each.type, "owner": each.name, "scheduler": each.scheduler, "held": each.held}
            for each in device.reservation_status.reservations
        ],
        "limits": [dict(each._asdict()) for each in device.limits],
        "cgroup_limits": None
        if reading.limits is None
        else [
            {"cgroup": each.cgroup, "maximum": each.maximum, "used": each.current}
            for each in reading.limits
            if each.maximum is not None
        ],
        "cgroup_limits_failed": "limits" in reading.failed,
        "partition": reading.partition,
        "schedulers": [] if device.reservation_status is None else list(device.reservation_status.schedulers),
        "owners": None if device.owner_usage is None else device.owner_usage.holding,
        "hidden": None
        if device.hidden is None
        else [
            {
                "pid": hidden.pid,
                "kind": hidden.kind,
                "command": hidden.command,
                "user": hidden.user,
                "about": about_hidden(hidden.kind),
            }
            for hidden in device.hidden
        ],
    }


def holding_json(
    holding: Holding, device: DeviceSnapshot, snapshot: Snapshot, growth: HoldingGrowth | None = None
) -> dict[str, Json]:
    """Return one holding of a device as JSON values."""
    process = snapshot.processes.get(holding.pid)
    facts = snapshot.facts_of(holding.pid)
    policy = process.policy if process is not None and facts is not None else None
    return {
        "pid": holding.pid,
        "user": facts.user if facts is not None else None,
        "owner": None if facts is None or facts.owner is None else dict(facts.owner._asdict()),
        "pod_labels": _pod_labels(snapshot, facts),
        "command": facts.command if facts is not None else None,
        "framework": policy.framework if policy is not None else None,
        "policy": policy.policy if policy is not None else None,
        "policy_source": policy.source if policy is not None else None,
        "policy_why": policy.why if policy is not None else None,
        "started": process.start_time if process is not None else None,
        "memory": holding.memory,
        "held": holding.held,
        "uncharged": None
        if holding.uncharged is None
        else {
            "least": holding.uncharged.least,
            "most": holding.uncharged.most,
            "managed": holding.uncharged.managed,
            "grade": holding.uncharged.grade.value,
            "why": holding.uncharged.why,
        },
        "kv_cache": _kv_cache(snapshot, holding.pid),
        "peak": holding.peak,
        "state": holding.state.value,
        "grade": holding.grade.value,
        "since": holding.since,
        "why": holding.why,
        "sm_utilization": holding.sm,
        "last_active": holding.last_active,
        "quiet_since": holding.quiet_since if holding.evidence else None,
        "working": holding.working,
        "busy_without_work_since": holding.busy_without_work_since,
        "wasted": holding.wasted,
        "growth": None if growth is None else {"bytes": growth.bytes, "seconds": growth.seconds},
        "what_to_do": remedy(holding, process, device),
        "unreserved": None
        if device.reservation_status is None or device.reservation_status.unreserved_pids is None
        else holding.pid in device.reservation_status.unreserved_pids,
        "limited_by": _limited_by(snapshot, facts),
        "agent": _agent(snapshot.agents.get(holding.pid), device.reading.uuid, holding),
    }


def _kv_cache(snapshot: Snapshot, pid: int) -> Json:
    known = snapshot.kv_caches.get(pid)
    return None if known is None else dict(zip(("usage", "memory", "tokens"), known[2:], strict=True))


def _limited_by(snapshot: Snapshot, facts: ProcessFacts | None) -> Json:
    """Return the cgroups of a process, with those above them, that have a limit on any device."""
    place = None if facts is None or facts.cgroup is None else unified_path(facts.cgroup)
    if place is None:
        return None
    limits = (each for device in snapshot.devices for each in device.reading.limits or ())
    limited = {each.cgroup for each in limits if each.maximum is not None}
    return [cgroup for cgroup in chain_of(place) if cgroup in limited]


def _pod_labels(snapshot: Snapshot, facts: ProcessFacts | None) -> Json:
    labels = None if facts is None else snapshot.pod_labels_of(facts.owner)
    return None if labels is None else dict(labels)


def _agent(agent: AgentSnapshot | None, uuid: str, holding: Holding) -> Json:
    """Return what the holder's agent reports about one device; never the paths that it names."""
    if agent is None:
        return None
    report = agent.report
    reported = {each.framework: each for each in report.frameworks} if report is not None else {}
    unreported = FrameworkReport("")
    oom = report.last_oom if report is not None else None
    return {
        "up": agent.up,
        "problem": agent.problem or None,
        "why": agent.why or None,
        "received": agent.received,
        "version": report.agent if report is not None else None,
        "consents": list(report.consents) if report is not None else [],
        "overhead": overhead(agent, uuid, holding),
        "needed_peak": needed(agent, uuid, holding),
        "frameworks": [
            {
                "framework": pool.framework,
                "title": REPORTING_FRAMEWORKS[pool.framework].title,
                "ordinal": pool.ordinal,
                "categories": dict(pool.categories),
                "settings": dict(reported.get(pool.framework, unreported).settings),
                "pinned": reported.get(pool.framework, unreported).pinned,
                "pinned_in_use": reported.get(pool.framework, unreported).pinned_in_use,
                **pool.figures,
                **dict.fromkeys(POOL_FIGURES),
                **pool.general,
            }
            for pool in agent.pools.get(uuid, ())
        ],
        "last_oom": None
        if oom is None
        else {
            "time": oom.time,
            "framework": oom.framework,
            "requested": oom.requested,
            "verdict": oom.verdict,
            "on_this_device": _failed_here(agent, uuid, oom),
        },
    }


def _failed_here(agent: AgentSnapshot, uuid: str, oom: OutOfMemory) -> bool | None:
    """Tell whether an allocation failed on this device; None when that is not known."""
    ordinals = [pool.ordinal for pool in agent.pools.get(uuid, ()) if pool.framework == oom.framework]
    if oom.ordinal is None or not ordinals or None in ordinals:
        return None
    return oom.ordinal in ordinals
