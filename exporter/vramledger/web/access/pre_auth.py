"""Refuse requests without a valid login at the first bytes of a connection, before aiohttp builds anything.

Requests that are refused without any computing (no login, an address that has failed too often, a full queue)
are answered here from prepared bytes, at half of the CPU. Everything else, and everything unclear, is left to
aiohttp: it gets the connection with all that was sent, and the access control decides as usual.

A few refused connections may stay open and try again, so that guessing over TLS does not cost us a handshake
each time. They are few, because the more there are, the longer Python's garbage collection takes.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from aiohttp import web

_REFUSED_MAX = 64
"""The maximum number of connections that may stay open after a refusal. Over TLS a guess on an open
connection takes a third of the time of one on a new connection."""

_UNREAD = 16384
"""The bytes that a client may leave unread. Not 0: over TLS the tickets of the handshake may be among
them."""

_HEAD_END = b"\r\n\r\n"
_CLOSE_HEADER = b"\r\nconnection: close\r\n"
_AUTHORIZATION = b"authorization:"
_WITH_BODY = (b"\r\ncontent-length", b"\r\ntransfer-encoding", b"\r\nexpect", b"\r\nupgrade")
"""Headers of requests that may have a body. If we closed before reading it, the kernel would report a
reset connection to the client instead of our answer."""


class PreAuthConnection(Protocol):
    """A connection that can be watched and ended."""

    @property
    def transport(self) -> asyncio.BaseTransport | None:
        """The transport of the connection, None once the connection has ended."""

    def force_close(self) -> None:
        """End the connection now."""


class EarlyRefusal(Protocol):
    """Refuse requests where no computing is needed for it; :class:`AccessControl` implements this."""

    @property
    def restricted(self) -> bool:
        """Whether anything may be refused immediately."""

    def refusal_at_once(self, authorization: str, address: str, *, last: bool) -> bytes | None:
        """Return the whole answer to a request with this header, None if the decision needs computing."""


class PreAuthFactory:
    """Make the protocol of each new connection, as the server's protocol factory."""

    def __init__(self, server: web.Server, access: EarlyRefusal) -> None:
        self.access = access
        self._server = server
        self._unauthorised: set[PreAuthProtocol] = set()
        self._refused: set[PreAuthProtocol] = set()

    def __call__(self) -> asyncio.Protocol:
        """Return a protocol for a connection."""
        return PreAuthProtocol(self) if self.access.restricted else self.make_http_protocol()

    def make_http_protocol(self) -> asyncio.Protocol:
        """Return aiohttp's protocol, which answers everything."""
        return self._server()

    @property
    def connections(self) -> list[PreAuthConnection]:
        """All open connections, before authorisation and after it."""
        return [*self._unauthorised, *self._server.connections]

    def close(self) -> None:
        """End the connections that no request has authorised."""
        for protocol in tuple(self._unauthorised):
            protocol.force_close()

    def add(self, protocol: PreAuthProtocol) -> None:
        """Count a connection among those without authorisation."""
        self._unauthorised.add(protocol)

    def remove(self, protocol: PreAuthProtocol) -> None:
        """Stop counting a connection; it may have been removed before."""
        self._unauthorised.discard(protocol)
        self._refused.discard(protocol)

    def keep_refused(self, protocol: PreAuthProtocol) -> bool:
        """Tell whether a connection that is refused may stay, and count it if so."""
        if len(self._refused) < _REFUSED_MAX:
            self._refused.add(protocol)
        return protocol in self._refused


class PreAuthProtocol(asyncio.Protocol):
    """A connection on which no request was authorised yet."""

    transport: asyncio.Transport | None = None

    def __init__(self, factory: PreAuthFactory) -> None:
        self._factory = factory

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 of TCP, a Unix socket or TLS
        self.transport = transport
        self._factory.add(self)

    def data_received(self, data: bytes) -> None:
        """Refuse the request if that needs no computing, otherwise hand the connection to aiohttp."""
        transport = self.transport
        if transport is None or transport.is_closing():
            return
        login = read_authorization(data)
        # A client that does not read an answer before its next request would make us keep all answers.
        full = transport.get_write_buffer_size() > _UNREAD
        last = full or _CLOSE_HEADER in data.lower() or not self._factory.keep_refused(self)
        access = self._factory.access
        answer = None if login is None else access.refusal_at_once(login, peer_address(transport), last=last)
        if answer is None:
            self._hand_over(transport, data)
            return
        transport.write(answer)
        if last:
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop counting the connection."""
        del exc  # the client is gone, for whatever reason
        self.transport = None
        self._factory.remove(self)

    def force_close(self) -> None:
        """End the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def _hand_over(self, transport: asyncio.Transport, data: bytes) -> None:
        """Give the connection to aiohttp, as if aiohttp had had it from the beginning."""
        self._factory.remove(self)
        protocol = self._factory.make_http_protocol()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        protocol.data_received(data)


def peer_address(transport: asyncio.BaseTransport) -> str:
    """Return the address at the other end, as aiohttp's ``request.remote`` is."""
    name = transport.get_extra_info("peername")
    return str(name[0] if isinstance(name, (tuple, list)) else name or "")


def read_authorization(data: bytes) -> str | None:
    """Return the Authorization header of a plain GET, empty if it has none; None for anything else.

    Plain means one whole request of HTTP/1.1, without a body, with nothing after it, and with at most one
    login. A malformed header does not matter to a client that is refused, and aiohttp reads all other
    requests again.
    """
    if not data.startswith(b"GET ") or data.find(_HEAD_END) != len(data) - len(_HEAD_END):
        return None
    lowered = data.lower()
    if data[: data.find(b"\r\n")][-9:] != b" HTTP/1.1" or any(each in lowered for each in _WITH_BODY):
        return None
    begin = lowered.find(b"\r\n" + _AUTHORIZATION)
    if begin < 0:
        return "" if _AUTHORIZATION not in lowered else None
    begin += len(_AUTHORIZATION) + 2
    end = data.find(b"\r\n", begin)
    if lowered.count(_AUTHORIZATION) > 1 or data[end + 2 : end + 3] in (b" ", b"\t"):
        return None
    return data[begin:end].decode("utf-8", "surrogateescape").strip(" \t")
