"""Keep one connected process: its messages, how many of them are read, its last report."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import NamedTuple

from vramledger.agent_server.credentials import Peer, read_sender
from vramledger.agent_server.disposal import holds_descriptors, receive_plain
from vramledger.model.agent_report import Agent, AgentReport, refuse
from vramledger.rate_limit import TokenBucket
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

MESSAGE_RATE = 4.0
MESSAGE_BURST = 16.0
"""Messages that are read from one connection: per second, and in one burst after a pause."""

SILENT_AFTER = 10.0
"""Seconds without a report after which an agent is silent, or five intervals if that is more."""

_RECEIVES_AT_ONCE = 128
"""Messages that are read from one connection at once; the kernel queues about as many."""


_TRUNCATED = int(socket.MSG_TRUNC)
"""As a plain number, which is faster to compare."""


class Message(NamedTuple):
    """One message and its sender."""

    data: bytes
    sender: int | None


@dataclass(eq=False, slots=True)
class AgentConnection:
    """A connected process."""

    socket: socket.socket  # our end
    peer: Peer  # which process it is
    since: float  # when it connected (the server's clock)
    report_time: float | None = None  # when its newest report came
    received: float | None = None  # the time of the newest report in Unix time
    report: AgentReport | None = None  # the newest report
    overfull: bool = False  # whether more messages waited at the last reading than are read at once
    passed_on: bool = False  # whether an agent has got this connection, to answer a request
    bucket: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = TokenBucket(self.since, MESSAGE_RATE, MESSAGE_BURST)

    def agent(self, now: float) -> Agent:
        """Return what is known of it now, without a report that is too old."""
        peer, report = self.peer, self.report
        silent = True
        if report is not None and self.report_time is not None:
            silent = now - self.report_time > max(SILENT_AFTER, 5 * report.interval)
        problem = "silent" if silent else ""
        return Agent(peer.pid, peer.start, peer.uid, self.received, problem, None if silent else report)

    def receive_newest(self) -> Message | None:
        """Return the newest of the waiting messages, None if none waits.

        A report is the full state, so the older ones say nothing more. Before the first report only one
        message is read: it may be a request, and what follows on its connection is for the agent. Raises
        EOFError if the peer has closed. Raises RefusedError if a message was too long, or came with
        descriptors.
        """
        newest: Message | None = None
        self.overfull = False
        for _ in range(_RECEIVES_AT_ONCE if self.report is not None else 1):
            try:
                message = self._receive_message()
            except BlockingIOError:
                break
            except (EOFError, ConnectionError):
                if newest is None:
                    raise
                break  # the socket says so again
            if newest is not None and message.sender != self.peer.pid == newest.sender:
                continue  # a forked child's message must not hide its parent's
            newest = message
        else:
            self.overfull = self.report is not None
        return newest

    def _receive_message(self) -> Message:
        if holds_descriptors(self.socket):
            refuse("limits", "a message to the exporter has no descriptors")
        data, ancillary, flags = receive_plain(self.socket, MAX_MESSAGE_BYTES + 1)
        if not data:
            raise EOFError
        if flags & _TRUNCATED or len(data) > MAX_MESSAGE_BYTES:
            refuse("size", f"longer than {MAX_MESSAGE_BYTES} bytes")
        return Message(data, read_sender(ancillary))
