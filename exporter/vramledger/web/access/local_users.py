"""Ask the kernel which user of this host has a TCP socket (sock_diag(7))."""

from __future__ import annotations

import ipaddress
import socket
import struct
from typing import Any

_SOCK_DIAG, _REQUEST = 20, 1
_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_ASKED = struct.Struct("=BBBBI")
_IDENTITY = struct.Struct(">HH16s16s")
_NO_COOKIE = 0xFFFFFFFF
_INTERFACE_AND_COOKIE = struct.Struct("=III")
_ALL_STATES = 0xFFFFFFFF
_STATE_OFFSET, _ESTABLISHED, _LISTENING = 16 + 1, 1, 10
"""Of a socket that its program has closed, the kernel says that it is root's: only an open one counts."""

_SCOPE = 3
"""Where an IPv6 socket's address has its interface."""

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address
_End = tuple[_Address, int]

_UID = struct.Struct("=I")
_UID_OFFSET = 16 + 4 + 48 + 12
"""Where the uid is: behind the header, four bytes, the identity and three counters."""


def find_local_user(peer: tuple[Any, ...] | None, ours: tuple[Any, ...] | None) -> int | None:
    """Return the user of a peer on this host, by any of its addresses; None for others, or if not known."""
    if not peer or not ours:
        return None
    try:
        here, there = parse_address(peer[0]), parse_address(ours[0])
    except ValueError:
        return None
    interface = peer[3] if len(peer) > _SCOPE else 0  # of an address that is only valid there
    return _user_of((here, peer[1]), (there, ours[1]), _ESTABLISHED, interface)


def find_listening_user(host: str, port: int) -> int | None:
    """Return the user ID of whoever listens at an address of loopback; None where that is not known."""
    try:
        address = parse_address(host)
    except ValueError:
        return None
    # No connection has port 0, so the kernel finds the socket that would accept one.
    return _user_of((address, port), (address, 0), _LISTENING) if address.is_loopback else None


def _user_of(own: _End, other: _End, state: int, interface: int = 0) -> int | None:
    """Return the user ID of a socket in this state, by its address and port and those of its other end."""
    (here, port), (there, to) = own, other
    try:
        family = socket.AF_INET if here.version == 4 else socket.AF_INET6  # noqa: PLR2004
        identity = _IDENTITY.pack(port, to, here.packed.ljust(16, b"\0"), there.packed.ljust(16, b"\0"))
        identity += _INTERFACE_AND_COOKIE.pack(interface, _NO_COOKIE, _NO_COOKIE)
        asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + identity
        request = _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG, _REQUEST, 1, 0) + asked
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
            kernel.setblocking(False)  # noqa: FBT003 the standard library's
            kernel.send(request)
            answer = kernel.recv(4096)
    except OSError:
        return None
    whole = len(answer) >= _UID_OFFSET + _UID.size and _HEADER.unpack_from(answer)[1] == _SOCK_DIAG
    if not whole or answer[_STATE_OFFSET] != state:
        return None
    return int(_UID.unpack_from(answer, _UID_OFFSET)[0])


def parse_address(address: str) -> _Address:
    """Read an address; that of IPv4 on a socket for both kinds is its IPv4 address."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed
