"""Turns strangers away at the first bytes of a connection, before aiohttp has built anything for it.

What is refused without any computing (no login, an address that has failed too often, a full queue) is
answered here from bytes that are kept, at half of the CPU. Everything else, and everything that is not plain
to see, is aiohttp's: it gets the connection with all that was sent, and the gate decides as ever.

Of the refused a few may stay and ask again, so that who guesses over TLS does not cost us a handshake each
time; but few, since Python's search for garbage takes the longer the more there are.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web

_KEPT = 64
# Connections that may stay after a refusal. Over TLS a guess on one takes a third of what a new one takes.

_UNREAD = 16384
# Bytes that a client may leave unread. Not 0: over TLS the tickets of the handshake may be among them.

_END = b"\r\n\r\n"
_LAST = b"\r\nconnection: close\r\n"
_LOGIN = b"authorization:"
_NOT_ALONE = (b"\r\ncontent-length", b"\r\ntransfer-encoding", b"\r\nexpect", b"\r\nupgrade")
# Headers of requests after whose head something may follow. Closed before it was read, the kernel would
# tell the client of a reset connection instead of our answer.


class PreAuthConnection(Protocol):
    """A connection that can be watched and ended."""

    @property
    def transport(self) -> asyncio.BaseTransport | None:
        """Where its bytes go, None once it has ended."""

    def force_close(self) -> None:
        """End it now."""


class Gate(Protocol):
    """Who decides."""

    @property
    def closed(self) -> bool:
        """Whether anything may be refused at once."""

    def refusal_at_once(self, authorization: str, address: str, *, last: bool) -> bytes | None:
        """Return the whole answer to a request with this header, None if that takes more than a look."""


class Doorstep:
    """Makes the protocol of each new connection."""

    def __init__(self, server: web.Server, gate: Gate) -> None:
        self.gate = gate
        self._server = server
        self._visitors: set[_Visitor] = set()
        self._refused: set[_Visitor] = set()

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol for a connection."""
        return _Visitor(self) if self.gate.closed else self.within()

    def within(self) -> asyncio.Protocol:
        """Return a protocol that answers everything."""
        return self._server()

    @property
    def connections(self) -> list[PreAuthConnection]:
        """All that are open, on the step or within."""
        return [*self._visitors, *self._server.connections]

    def close(self) -> None:
        """End the connections that have not been let in."""
        for visitor in tuple(self._visitors):
            visitor.force_close()

    def came(self, visitor: _Visitor) -> None:
        """Count a connection among those on the step."""
        self._visitors.add(visitor)

    def went(self, visitor: _Visitor) -> None:
        """Forget a connection, which may have gone before."""
        self._visitors.discard(visitor)
        self._refused.discard(visitor)

    def bear(self, visitor: _Visitor) -> bool:
        """Tell whether a connection that is refused may stay, and count it if so."""
        if len(self._refused) < _KEPT:
            self._refused.add(visitor)
        return visitor in self._refused


class _Visitor(asyncio.Protocol):
    """A connection that has not been let in."""

    transport: asyncio.Transport | None = None

    def __init__(self, step: Doorstep) -> None:
        self._step = step

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 of TCP, a Unix socket or TLS
        self.transport = transport
        self._step.came(self)

    def data_received(self, data: bytes) -> None:
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        login = authorization(data)
        # Who does not take an answer before the next request would have us keep them all.
        full = transport.get_write_buffer_size() > _UNREAD
        last = full or _LAST in data.lower() or not self._step.bear(self)
        gate = self._step.gate
        answer = None if login is None else gate.refusal_at_once(login, address_of(transport), last=last)
        if answer is None:
            self._let_in(transport, data)
            return
        transport.write(answer)
        if last:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # the client is gone, however it went
        self.transport = None
        self._step.went(self)

    def force_close(self) -> None:
        """End it now."""
        if self.transport is not None:
            self.transport.abort()

    def _let_in(self, transport: asyncio.Transport, data: bytes) -> None:
        """Have aiohttp go on as if it had been there from the beginning."""
        self._step.went(self)
        protocol = self._step.within()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)


def address_of(transport: asyncio.BaseTransport) -> str:
    """Return the address at the other end, as aiohttp's ``request.remote`` is."""
    name = transport.get_extra_info("peername")
    return str(name[0] if isinstance(name, (tuple, list)) else name or "")


def authorization(data: bytes) -> str | None:
    """Return the Authorization header of a plain GET, empty if it has none; None for anything else.

    Plain is one whole request of HTTP/1.1 without a body and with nothing behind it, of at most one login.
    What is no header at all does not matter to who is refused, and aiohttp reads all others again.
    """
    if not data.startswith(b"GET ") or data.find(_END) != len(data) - len(_END):
        return None
    lowered = data.lower()
    if data[: data.find(b"\r\n")][-9:] != b" HTTP/1.1" or any(each in lowered for each in _NOT_ALONE):
        return None
    begin = lowered.find(b"\r\n" + _LOGIN)
    if begin < 0:
        return "" if _LOGIN not in lowered else None
    begin += len(_LOGIN) + 2
    end = data.find(b"\r\n", begin)
    if lowered.count(_LOGIN) > 1 or data[end + 2 : end + 3] in (b" ", b"\t"):
        return None
    return data[begin:end].decode("utf-8", "surrogateescape").strip(" \t")
