"""Handle requests over the socket: pass them on to an agent with the client's connection, or answer them."""

from __future__ import annotations

import array
import json
import os
import socket
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from vramledger.agent_protocol.messages import CONSENTS, MAX_MESSAGE_BYTES
from vramledger.agent_server import responses
from vramledger.agent_server.connection import AgentConnection
from vramledger.model.agent_report import Agent, refuse
from vramledger.model.snapshot import Snapshot


class RequestContext(Protocol):
    """What the answers need."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot."""

    def agent_connection(self, pid: int) -> AgentConnection | None:
        """Return the connection of a process' agent."""

    def agents(self) -> tuple[Agent, ...]:
        """Return the agents of all users."""


def answer_request(asker: AgentConnection, content: Mapping[str, Any], exporter: RequestContext) -> None:
    """Answer a request, or pass it on with the client's connection.

    Raises:
        RefusedError: it is not a request that we know.
        OSError: the client has gone.
    """
    name = content["ask"]
    if "to" in content:
        if (error := _forward_request(asker, content, exporter)) is not None:
            asker.socket.send(responses.failure_response(error))
    elif name == "devices":
        asker.socket.send(responses.devices_response(exporter.snapshot, asker.peer.pid, asker.peer.uid))
    elif name == "agents":
        _send_agents(asker, exporter.agents())
    else:
        refuse("format", "an unknown request")


def _send_agents(asker: AgentConnection, agents: Iterable[Agent]) -> None:
    """Send the list of agents as a file in memory: it can be larger than a message may be."""
    count, lines = responses.agents_response(agents, asker.peer.uid)
    file = os.memfd_create("vramledger-agents", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(file), "wb") as out:
            out.write(lines)
        os.lseek(file, 0, os.SEEK_SET)
        _send_with_descriptors(asker.socket, responses.success_response(agents=count), [file])
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
    pid, name = content["to"], content["ask"]
    if not isinstance(pid, int) or isinstance(pid, bool) or name not in CONSENTS:
        refuse("format", "a request must name a pid, and snapshot or reclaim")
    agent = exporter.agent_connection(pid)
    if agent is None:
        return f"no agent in pid {pid}; start it with 'vramledger run'"
    if asker.peer.uid not in (responses.ROOT_UID, agent.peer.uid):
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
