"""The live page's view of a snapshot: a flat table of rows, so that only rows that changed need be sent.

A row for the host (key ``""``), one a device (its UUID), one a holding (``UUID/pid``). What counts seconds in
words is left out, for it would change in every row with every sample; the page counts from the times.
"""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.document import document
from vramledger.jsonvalues import Json
from vramledger.snapshot import Snapshot, State
from vramledger.timeline import Growth, Key

Rows = dict[str, dict[str, Json]]

_COUNTING = (State.IDLE.value, State.ACTIVE.value)
# States whose evidence is "no GPU work seen for 69 s".

_SETTLED = 0.001
# Growth in less than a thousandth of the holding is none, and its seconds go on by themselves.


def rows(snapshot: Snapshot, growth: Mapping[Key, Growth], *, ready: bool) -> Rows:
    """Return the rows of a snapshot by key."""
    book = document(snapshot, growth)
    devices = book.pop("devices")
    found: Rows = {"": {**book, "ready": ready}}
    for device in devices if isinstance(devices, list) else ():
        if not isinstance(device, dict):  # pragma: no cover - the type of Json cannot say more
            continue
        uuid = str(device["uuid"])
        holdings = device.pop("holdings")
        found[uuid] = device
        for holding in holdings if isinstance(holdings, list) else ():
            if isinstance(holding, dict):
                found[f"{uuid}/{holding['pid']}"] = _steady(holding, uuid, device["gpu"])
    return found


def _steady(holding: dict[str, Json], uuid: str, gpu: Json) -> dict[str, Json]:
    grown = holding["growth"]
    if isinstance(grown, dict):
        size = holding["memory"]
        change, seconds = grown["bytes"], grown["seconds"]
        if isinstance(size, int) and isinstance(change, int) and isinstance(seconds, float):
            # Whole minutes once it is older than one: else every row would change with every sample.
            grown["seconds"] = seconds // 60 * 60 if seconds >= 60 else seconds // 10 * 10  # noqa: PLR2004
            grown["bytes"] = 0 if abs(change) < _SETTLED * size else change
    if holding["state"] in _COUNTING:
        holding["why"] = None
    return {"uuid": uuid, "gpu": gpu, **holding}


def difference(before: Rows, after: Rows) -> tuple[Rows, list[str]]:
    """Return the rows that are new or changed, and the keys of those that are gone."""
    changed = {key: row for key, row in after.items() if before.get(key) != row}
    return changed, [key for key in before if key not in after]
