"""Handle requests over the socket: answer, or pass to an agent; what a client may see is decided here."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vramledger import __version__
from vramledger.agent_server.connection import AgentConnection
from vramledger.model.agent_report import Agent, refuse
from vramledger.model.records import write_record
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger_agent.client import is_outside_containers
from vramledger_agent.protocol.messages import CONSENTS, MAX_MESSAGE_BYTES, make_failure, make_success

_OWN_REQUESTS = ("devices", "agents")


class RequestContext(Protocol):
    """What the answers need of the server, which imports us."""

    @property
    def snapshot(self) -> Snapshot: ...
    def agent_connection(self, pid: int) -> AgentConnection | None: ...
    def agents(self) -> tuple[Agent, ...]: ...


def answer_request(asker: AgentConnection, content: Mapping[str, Any], exporter: RequestContext) -> None:
    """Answer a request or pass it on. Raises RefusedError if its format is wrong, OSError if they left."""
    name = content["ask"]
    if not isinstance(name, str):
        refuse("format", "a request must have a name")
    if name not in (CONSENTS if "to" in content else _OWN_REQUESTS):
        unknown = f"the exporter, of version {__version__}, does not know this request"
        asker.socket.send(failure_response(unknown))
    elif "to" in content:
        if (error := _forward_request(asker, content, exporter)) is not None:
            asker.socket.send(failure_response(error))
    elif name == "devices":
        asker.socket.send(devices_response(exporter.snapshot, asker.peer.pid, asker.peer.uid))
    else:
        _send_agents(asker, exporter.agents())


def _send_agents(asker: AgentConnection, agents: Iterable[Agent]) -> None:
    """Send the list of agents: as a file in memory to those we trust, cut to one message to others.

    The file's pages are charged to us for as long as anybody keeps it.
    """
    count, lines = agents_response(agents, asker.peer.uid)
    trusted = asker.peer.uid in (ROOT_UID, os.geteuid()) and is_outside_containers(asker.peer.pid)
    if not trusted:
        asker.socket.send(success_response(agents=count))
        asker.socket.send(lines[: lines.rfind(b"\n", 0, MAX_MESSAGE_BYTES) + 1])
        return
    file = os.memfd_create("vramledger-agents", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(lines)
        os.lseek(file, 0, os.SEEK_SET)
        _send_with_descriptors(asker.socket, success_response(agents=count), [file])
    finally:
        os.close(file)


def _forward_request(
    asker: AgentConnection, content: Mapping[str, Any], exporter: RequestContext
) -> str | None:
    """Pass a request on to an agent; return why that was not possible.

    The agent takes the client's credentials from the passed connection itself, and decides. It also receives
    the client's file from there: we receive no descriptor. We already refuse another user's request, so that
    it causes the agent no work.
    """
    pid = content["to"]
    if not isinstance(pid, int) or isinstance(pid, bool):
        refuse("format", "a request must name a pid")
    agent = exporter.agent_connection(pid)
    if agent is None:
        return f"no agent in pid {pid}; start it with 'vramledger run'"
    if asker.peer.uid not in (ROOT_UID, agent.peer.uid):
        return f"pid {pid} belongs to another user; run this as that user or as root"
    forwarded = json.dumps({key: value for key, value in content.items() if key != "to"}).encode()
    if len(forwarded) > MAX_MESSAGE_BYTES:
        return "the request is too long"
    try:
        _send_with_descriptors(agent.socket, forwarded, [asker.socket.fileno()])
    except BlockingIOError:
        return f"the agent in pid {pid} does not listen at the moment; ask again later"
    except OSError as error:
        return f"the agent in pid {pid} cannot be reached: {error.strerror or error}"
    asker.passed_on = True
    return None


def _send_with_descriptors(to: socket.socket, data: bytes, descriptors: list[int]) -> None:
    rights = array.array("i", descriptors)
    to.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)], socket.MSG_DONTWAIT)


ROOT_UID = 0
_MAX_HOLDERS = (64, 16, 4, 0)
"""The maximum number of holders in an answer: numbers are tried until it fits in a message."""


def failure_response(error: str) -> bytes:
    return json.dumps(make_failure(error)).encode()


def success_response(**more: object) -> bytes:
    return json.dumps(make_success(**more), separators=(",", ":")).encode()


def devices_response(snapshot: Snapshot, pid: int, uid: int) -> bytes:
    """Return the devices and their holders; only root gets the pids and names of other users' holders.

    ``pid``: of the client as the kernel tells it to us. In another PID namespace it differs from the client's
    own number. The client's own holdings are marked ``self``, and never left out.
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
    return len(shown), b"".join(write_record(each) + b"\n" for each in shown)
