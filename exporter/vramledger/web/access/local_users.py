"""Ask the kernel which user of this host has a TCP socket (sock_diag(7)), and which addresses are its own."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any, NamedTuple

_HEADER = struct.Struct("=IHHII")
_REQUEST, _ERROR = 1, 2

_SOCKETS, _SOCK_DIAG = 4, 20
_ASKED = struct.Struct("=BBBBI")
_IDENTITY = struct.Struct(">HH16s16s")
_NO_COOKIE = 0xFFFFFFFF
_INTERFACE_AND_COOKIE = struct.Struct("=III")
_ALL_STATES = 0xFFFFFFFF
_FOUND = struct.Struct("=17xB42x8s12xII")
_LISTENING = 10

_SCOPE = 3
"""Where an IPv6 socket's address has its interface, if it is only valid there."""

_LOOPBACK = 1
"""The interface lo, which has this number everywhere: with it, sockets bound to lo are found, too."""

_ROUTES, _GET_ROUTE = 0, 26
_ROUTE = struct.Struct("=BB10xHH")
_ATTRIBUTE, _DESTINATION = 4, 1
_ROUTE_TYPE, _LOCAL = 16 + 7, 2

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Socket(NamedTuple):
    """A socket of this host."""

    state: int
    cookie: bytes  # which no other socket has
    user: int
    inode: int  # 0 for one that no program has open, whose user is then root


def find_local_user(peer: tuple[Any, ...], ours: tuple[Any, ...]) -> int | None:
    """Return the user of a peer on this host, by any of its addresses; None for others, or if not known."""
    found = _find(peer, ours)
    return found.user if found is not None and found.inode else None


def find_listener(address: tuple[Any, ...]) -> Socket | None:
    """Return what listens at an address of this host; None for those of others, or if not known."""
    # No connection has port 0, so the kernel finds the socket that would accept one.
    return _find(address, (address[0], 0)) if is_of_this_host(address[0]) else None


def is_of_this_host(address: str) -> bool:
    """Tell whether this host delivers to itself what it sends to an address."""
    parsed = parse_address(address)
    size = len(parsed.packed)
    route = _ROUTE.pack(_family(parsed), 8 * size, _ATTRIBUTE + size, _DESTINATION) + parsed.packed
    answer = _exchange(_ROUTES, _GET_ROUTE, route)
    return parsed.is_loopback or answer[_ROUTE_TYPE] == _LOCAL


def _find(own: tuple[Any, ...], other: tuple[Any, ...]) -> Socket | None:
    """Return the socket with these two ends; one that listens only where the other end has no port."""
    here, there = parse_address(own[0]), parse_address(other[0])
    interface = (own[_SCOPE] if len(own) > _SCOPE else 0) or _LOOPBACK
    ends = here.packed.ljust(16, b"\0"), there.packed.ljust(16, b"\0")
    identity = _IDENTITY.pack(own[1], other[1], *ends)
    identity += _INTERFACE_AND_COOKIE.pack(interface, _NO_COOKIE, _NO_COOKIE)
    asked = _ASKED.pack(_family(here), socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + identity
    found = Socket(*_FOUND.unpack_from(_exchange(_SOCKETS, _SOCK_DIAG, asked)))
    return found if found.state and (found.state == _LISTENING) == (not other[1]) else None


def _exchange(protocol: int, kind: int, content: bytes) -> bytes:
    """Return the kernel's answer with its header; zeros if it has none."""
    request = _HEADER.pack(_HEADER.size + len(content), kind, _REQUEST, 1, 0) + content
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, protocol) as kernel:
            kernel.setblocking(False)  # noqa: FBT003 the standard library's
            kernel.send(request)
            answer = kernel.recv(4096)
    except OSError:
        answer = b""
    refused = not answer or _HEADER.unpack_from(answer)[1] == _ERROR
    return bytes(_FOUND.size) if refused else answer.ljust(_FOUND.size, b"\0")


def _family(address: _Address) -> int:
    return socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004


def parse_address(address: str) -> _Address:
    """Read an address; that of IPv4 on a socket for both kinds is its IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
