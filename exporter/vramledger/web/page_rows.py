"""Turn a snapshot into the live page's rows: a flat table, so that only changed rows need be sent.

There is a row for the host (key ``""``), one for each device (its UUID) and one for each holding
(``UUID/pid``). Words that count seconds are left out, because they would change every row with every sample;
the page counts from the times.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.model.records import Json
from vramledger.model.snapshot import Snapshot, State
from vramledger.views.ledger_json import snapshot_json
from vramledger.views.timeline import HoldingGrowth, Key

_WORKING_WITHIN = 2.0
"""Seconds since its last sign of work for which a holder counts as working."""

_ROUND_TO_MIN = 2**20
_ROUND_SHIFT = 11
"""The bytes to which an agent's figures are rounded for a small holding. For others it is less than a
thousandth of the holding, in powers of two, so that a round figure stays round."""

Rows = dict[str, dict[str, Json]]

_COUNTING_STATES = (State.IDLE.value, State.ACTIVE.value)
"""The states whose evidence counts seconds: "no sign of GPU work for 69 s"."""

_STEADY_SHARE = 0.001
"""A growth of less than a thousandth of the holding counts as none."""


def page_rows(snapshot: Snapshot, growth: Mapping[Key, HoldingGrowth], *, ready: bool) -> Rows:
    """Return the rows of a snapshot by key."""
    host = snapshot_json(snapshot, growth)
    devices = host.pop("devices")
    found: Rows = {"": {**host, "ready": ready}}
    for device in devices:
        uuid = device["uuid"]
        holdings = device.pop("holdings")
        del device["cgroup_limits"], device["cgroup_limits_failed"]  # the page shows those of owners
        found[uuid] = device
        for holding in holdings:
            found[f"{uuid}/{holding['pid']}"] = _holding_row(holding, uuid, device["gpu"], snapshot.time)
    return found


def _holding_row(holding: dict[str, Json], uuid: str, gpu: Json, now: float | None) -> dict[str, Json]:
    grown = holding["growth"]
    if isinstance(grown, dict):
        size = holding["memory"]
        change, seconds = grown["bytes"], grown["seconds"]
        if isinstance(size, int) and isinstance(change, int) and isinstance(seconds, float):
            # Whole minutes once it is older than a minute: otherwise every row would change with every
            # sample.
            grown["seconds"] = seconds // 60 * 60 if seconds >= 60 else seconds // 10 * 10  # noqa: PLR2004
            grown["bytes"] = 0 if abs(change) < _STEADY_SHARE * size else change
    agent = holding["agent"]
    if isinstance(agent, dict):
        holding["agent"] = _agent_columns(agent, holding["memory"])
    if holding["state"] in _COUNTING_STATES:
        holding["why"] = None
    holding.pop("limited_by")
    last = holding["last_active"]
    working = isinstance(last, float) and now is not None and now - last < _WORKING_WITHIN
    if working:  # times that move with the samples
        holding["last_active"] = holding["quiet_since"] = None
    return {"uuid": uuid, "gpu": gpu, "working_now": working, **holding}


def _agent_columns(agent: dict[str, Json], size: Json) -> dict[str, Json]:
    """Return what the page shows of an agent: bytes rounded to what the page displays, and no counters."""
    unit = _ROUND_TO_MIN
    if isinstance(size, int):
        unit = max(unit, 1 << size.bit_length() >> _ROUND_SHIFT)

    def rounded(value: Json) -> Json:
        return round(value / unit) * unit if isinstance(value, int) else None

    frameworks = agent["frameworks"]
    return {
        **{name: agent[name] for name in ("up", "problem", "why", "consents", "last_oom")},
        "overhead": rounded(agent["overhead"]),
        "needed_peak": rounded(agent["needed_peak"]),
        "frameworks": [
            {
                "title": each["title"],
                "in_use": rounded(each["in_use"]),
                "pool": rounded(each["pool"]),
                "reclaimable": rounded(each.get("reclaimable")),
            }
            for each in (frameworks if isinstance(frameworks, list) else ())
            if isinstance(each, dict)
        ],
    }


def changed_rows(before: Rows, after: Rows) -> tuple[Rows, list[str]]:
    """Return the rows that are new or changed, and the keys of those that are gone."""
    changed = {key: row for key, row in after.items() if before.get(key) != row}
    return changed, [key for key in before if key not in after]
