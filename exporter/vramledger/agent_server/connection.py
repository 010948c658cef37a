"""Keep one connected process: its messages, how many of them are read, its last report."""

from __future__ import annotations

import array
import os
import socket
from dataclasses import dataclass, field
from types import TracebackType

from vramledger.agent_protocol.messages import MAX_DESCRIPTORS, MAX_MESSAGE_BYTES
from vramledger.agent_server.credentials import Peer, read_sender
from vramledger.model.agent_report import Agent, AgentReport, RefusedError, refuse
from vramledger.rate_limit import TokenBucket

MESSAGE_RATE = 4.0
MESSAGE_BURST = 16.0
"""Messages that are read from one connection: the number per second, and the maximum in one burst after a
pause."""

SILENT_AFTER = 10.0
"""Seconds without a report after which an agent counts as silent, or five of its intervals if that is more.
"""

_RECEIVES_AT_ONCE = 128
"""The maximum number of messages that are read from one connection at once; the kernel queues about as many.
"""

_ANCILLARY_SIZE = socket.CMSG_SPACE(12) + socket.CMSG_SPACE(4 * (MAX_DESCRIPTORS + 1))


@dataclass(slots=True)
class Message:
    """One message and its sender; its descriptors are closed at the end of the block.

    ``last`` says that nothing follows: the peer has closed the connection.
    """

    data: bytes
    sender: int | None
    descriptors: list[int] = field(default_factory=list)
    last: bool = False

    def __enter__(self) -> Message:  # noqa: PYI034 Self is of Python 3.11
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptors that came with it."""
        while self.descriptors:
            os.close(self.descriptors.pop())


@dataclass(eq=False, slots=True)
class AgentConnection:
    """A connected process.

    Attributes:
        socket: our end.
        peer: which process it is.
        since: when it connected (the server's clock).
        report_time: when its newest report came.
        received: the time of the newest report in Unix time.
        report: the newest report.
    """

    socket: socket.socket
    peer: Peer
    since: float
    report_time: float | None = None
    received: float | None = None
    report: AgentReport | None = None
    bucket: TokenBucket = field(init=False)

    def __post_init__(self) -> None:
        self.bucket = TokenBucket(self.since, MESSAGE_RATE, MESSAGE_BURST)

    def close(self) -> None:
        """Close the connection and the descriptors."""
        self.socket.close()
        os.close(self.peer.pidfd)

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

        A report is the full state, so the older ones say nothing more.

        Raises:
            EOFError: the peer has closed.
            RefusedError: a message was too long.
        """
        newest: Message | None = None
        for _ in range(_RECEIVES_AT_ONCE):
            try:
                message = self._receive_message()
            except BlockingIOError:
                break
            except (EOFError, ConnectionError):
                if newest is None:
                    raise
                newest.last = True
                break
            except RefusedError:
                if newest is not None:
                    newest.close()
                raise
            if newest is not None:
                if message.sender != self.peer.pid == newest.sender:
                    message.close()  # a forked child's message must not hide its parent's
                    continue
                newest.close()
            newest = message
        return newest

    def _receive_message(self) -> Message:
        data, ancillary, flags, _ = self.socket.recvmsg(
            MAX_MESSAGE_BYTES + 1, _ANCILLARY_SIZE, socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
        message = Message(data, read_sender(ancillary), list(descriptors))
        if not data:
            message.close()
            raise EOFError
        if flags & socket.MSG_TRUNC or len(data) > MAX_MESSAGE_BYTES:
            message.close()
            refuse("size", f"longer than {MAX_MESSAGE_BYTES} bytes")
        if flags & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
            message.close()
            refuse("limits", f"more than {MAX_DESCRIPTORS} descriptors")
        return message
