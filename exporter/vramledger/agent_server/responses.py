"""Make the exporter's answers over the agents' socket, and decide what each client may see."""

from __future__ import annotations

import json
from collections.abc import Iterable

from vramledger.agent_protocol.messages import MAX_MESSAGE_BYTES, make_failure, make_success
from vramledger.model.agent_report import Agent
from vramledger.model.reading_json import agent_plain
from vramledger.model.snapshot import DeviceSnapshot, Snapshot

ROOT_UID = 0
_MAX_HOLDERS = (64, 16, 4, 0)
"""The maximum number of holders of a device: the numbers are tried in turn until the answer fits in a
message."""


def failure_response(error: str) -> bytes:
    """Return an answer that says why the request failed."""
    return json.dumps(make_failure(error)).encode()


def success_response(**more: object) -> bytes:
    """Return an answer that says that the request succeeded."""
    return json.dumps(make_success(**more), separators=(",", ":")).encode()


def devices_response(snapshot: Snapshot, pid: int, uid: int) -> bytes:
    """Return the devices and their holders; only root gets the pids and names of other users' holders.

    Args:
        snapshot: the newest.
        pid: of the client as the kernel tells it to us. In another PID namespace it differs from the client's
            own number. The client's own holdings are marked ``self``, and never left out.
        uid: of the client.
    """
    if not snapshot.up:
        return failure_response(snapshot.failure[1] if snapshot.failure else "no sample has finished yet")
    response = b""
    for most in _MAX_HOLDERS:
        response = success_response(
            devices=[_describe_device(each, snapshot, pid, uid, most) for each in snapshot.devices if each.up]
        )
        if len(response) <= MAX_MESSAGE_BYTES:
            return response
    return failure_response("too many devices for one message")


def _describe_device(
    device: DeviceSnapshot, snapshot: Snapshot, pid: int, uid: int, most: int
) -> dict[str, object]:
    ledger = device.ledger
    return {
        "uuid": device.reading.uuid,
        "index": device.reading.index,
        "total": None if ledger is None else ledger.total,
        "free": None if ledger is None else ledger.free,
        "used": None if ledger is None else ledger.used,
        "holders": list(_describe_holders(device, snapshot, pid, uid, most)),
    }


def _describe_holders(
    device: DeviceSnapshot, snapshot: Snapshot, pid: int, uid: int, most: int
) -> Iterable[dict[str, object]]:
    for rank, holding in enumerate(device.holdings):
        asker = holding.pid == pid
        if rank >= most and not asker:
            continue
        facts = snapshot.facts_of(holding.pid)
        owner = facts.owner if facts is not None else None
        managed = 0 if holding.uncharged is None else holding.uncharged.managed
        # Managed memory gives way to an allocation, so it is never the reason why one fails.
        held = None if holding.held is None else holding.held - managed
        about: dict[str, object] = {"state": holding.state.value, "bytes": held}
        if managed:
            about["managed"] = managed
        if asker:
            about["self"] = True
        if asker or uid == ROOT_UID or (facts is not None and facts.uid == uid):
            yield {"pid": holding.pid, "owner": None if owner is None else owner.name, **about}
        else:
            yield {"owner_type": None if owner is None else owner.type, **about}


def agents_response(connected: Iterable[Agent], uid: int) -> tuple[int, bytes]:
    """Return the number of agents that a client may see, and one JSON line for each of them."""
    shown = [each for each in connected if uid in (ROOT_UID, each.uid)]
    lines = [json.dumps(agent_plain(each), separators=(",", ":")) for each in shown]
    return len(shown), "".join(f"{line}\n" for line in lines).encode()
