"""Read which sockets are connected to which, and who listens where, as the kernel attests it."""

from __future__ import annotations

import os
import re
import socket
import struct
import sys
from collections.abc import Collection
from itertools import islice
from typing import NamedTuple

from vramledger.readers.hosts.stat import READ_ONLY, names_in

_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_DUMP = 0x301
"""NLM_F_REQUEST and NLM_F_DUMP: list all sockets."""

_DONE, _ERROR = 3, 2
_SHOW_NAME_AND_PEER = 0x1 | 0x4
_NAME, _PEER, _SHUTDOWN = 0, 2, 6
_HEADER, _SOCKET = struct.Struct("=IHHII"), struct.Struct("=BBBBIII")
_ALL = 0xFFFFFFFF
_LISTENS, _CONNECTED, _PEER_CLOSED = 10, 1, 8
"""States of a socket, the same numbers for Unix, TCP and UDP: LISTEN, ESTABLISHED, CLOSE_WAIT."""

_CALLS = 2
"""SYN_SENT: nobody has answered yet."""

_HALF_CLOSED = (4, 5)
"""FIN_WAIT1 and 2: we have said all, and the other end may go on."""

_BOTH_WAYS = 3
_BUFFER = 2**18
_Address = tuple[bytes, int]
MOST_SOCKETS = 100_000
"""Unix sockets that are read: they take 50 MiB, and a user may have millions."""

_TABLE_CAP = 4 * 2**20
"""Bytes of a table of TCP that are read: 27 thousand sockets."""

_MAPPED = b"0000000000000000FFFF0000"
"""The beginning of an address of IPv4 in the table of IPv6."""

_DRIVERS_NAME = b"\0cuda-uvmfd-"
"""How the name of libcuda's socket begins, before the PID namespace and the pid. Every program that uses
CUDA listens there for those that import its memory (seen on an H100): it says nothing of who wants it."""

_LOOPBACK_4, _LOOPBACK_6 = b"7F", b"0" * 24 + b"01000000"


class SocketEnd(NamedTuple):
    """A socket: whether it listens for anybody, has lost its other end, or which socket that is."""

    # somebody may still connect to it. A port that the kernel has chosen does not count, since nobody finds
    # it who was not told
    listens: bool = False
    severed: bool = False  # its other end, on this host, is gone
    peer: int = 0  # the other end on this host; 0 if there is none, or if it is elsewhere
    elsewhere: bool = False  # it is connected to another host, or waits for a server to accept it
    port: int = 0  # of TCP, the port to which it was connected before it was severed

    @property
    def peer_name(self) -> str:
        """The name of the other end in /proc."""
        return f"socket:[{self.peer}]"


def unix_sockets() -> dict[int, SocketEnd]:
    """Return the Unix sockets of our network namespace by inode.

    A connection of whole messages to a socket with a name is that of an agent with its exporter, which wants
    nothing of the program; it is left out. Raises OSError if the kernel does not say, or there are too many.
    """
    listed: dict[int, tuple[int, int, dict[int, bytes]]] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(1.0)
        wanted = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, _ALL, 0, _SHOW_NAME_AND_PEER, _ALL, _ALL)
        link.send(_HEADER.pack(_HEADER.size + len(wanted), _SOCK_DIAG_BY_FAMILY, _DUMP, 1, 0) + wanted)
        while _read_unix(link.recv(_BUFFER), listed):
            if len(listed) > MOST_SOCKETS:
                raise OSError(f"there are more than {MOST_SOCKETS} Unix sockets")
    found = {}
    for inode, (kind, state, attributes) in listed.items():
        peer = int.from_bytes(attributes.get(_PEER, b""), sys.byteorder)
        shut = attributes.get(_SHUTDOWN, b"\0")[0] & _BOTH_WAYS == _BOTH_WAYS
        other = listed.get(peer)
        if state == _LISTENS:
            found[inode] = SocketEnd(listens=not attributes.get(_NAME, b"").startswith(_DRIVERS_NAME))
        elif kind == socket.SOCK_SEQPACKET and (other is None or _NAME in other[2]):
            found[inode] = SocketEnd()
        elif state == _CONNECTED and kind != socket.SOCK_DGRAM:
            # One that the server has not accepted yet has no other end either, and waits for it.
            found[inode] = SocketEnd(severed=shut and other is None, peer=peer, elsewhere=not (shut or peer))
        else:
            # Whom it calls can order it only by a name, or if it is connected too; a log's server is not.
            name = attributes.get(_NAME, b"")
            reached = other is not None and (
                name or int.from_bytes(other[2].get(_PEER, b""), sys.byteorder) == inode
            )
            # Those of NCCL have names of no file; whoever made a file wants to be found.
            found[inode] = SocketEnd(listens=name[:1] not in (b"", b"\0"), peer=peer if reached else 0)
    return found


def _read_unix(data: bytes, listed: dict[int, tuple[int, int, dict[int, bytes]]]) -> bool:
    at = 0
    while at < len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if kind == _DONE:
            return False
        if kind == _ERROR:
            raise OSError("the kernel does not list Unix sockets")
        body, end = at + _HEADER.size, at + length
        _, socket_kind, state, _, inode, *_ = _SOCKET.unpack_from(data, body)
        attributes, place = {}, body + _SOCKET.size
        while place < end:
            size, name = struct.unpack_from("=HH", data, place)
            attributes[name] = data[place + 4 : place + size]
            place += max(4, (size + 3) & ~3)
        listed[inode] = socket_kind, state, attributes
        at += max(_HEADER.size, (length + 3) & ~3)
    return True


def tcp_sockets(directory: str, chosen_ports: range) -> dict[int, SocketEnd]:
    """Return a process' TCP sockets; the kernel chooses ``chosen_ports``. Raises OSError if too many."""
    ends = _read_ends(directory, "tcp")
    by_ends = {(local, remote): inode for local, remote, _, inode in ends}
    listening = {local[1] for local, _, state, _ in ends if state == _LISTENS}
    here = {local[0] for local, *_ in ends}
    found = {}
    for local, remote, state, inode in ends:
        is_here = _is_here(remote, here)
        peer = by_ends.get((remote, local), 0)
        if state == _LISTENS:
            found[inode] = SocketEnd(listens=local[1] not in chosen_ports)
        elif state == _PEER_CLOSED and not peer:  # who has said all, and waits for our answer, has a socket
            # One that a server has accepted was ended by its client, and says nothing of who started it.
            found[inode] = SocketEnd(severed=is_here and local[1] not in listening, port=remote[1])
        elif state in {_CONNECTED, _PEER_CLOSED, *_HALF_CLOSED}:
            found[inode] = SocketEnd(peer=peer, elsewhere=not peer)
        elif inode:  # a connection that has ended waits for a minute without a socket
            found[inode] = SocketEnd(elsewhere=state == _CALLS and not is_here)
    return found


def udp_sockets(directory: str, chosen_ports: range) -> dict[int, SocketEnd]:
    """Return a process' UDP sockets as :func:`tcp_sockets` does; none is severed, as no event says so."""
    ends = _read_ends(directory, "udp")
    connected = {(local, remote): inode for local, remote, state, inode in ends if state == _CONNECTED}
    bound = {local[1]: inode for local, _, state, inode in ends if state != _CONNECTED}
    here = {local[0] for local, *_ in ends}
    found = {}
    for local, remote, state, inode in ends:
        if state == _CONNECTED:
            peer = connected.get((remote, local), 0) or (
                bound.get(remote[1], 0) if _is_here(remote, here) else 0
            )
            found[inode] = SocketEnd(peer=peer, elsewhere=not peer and not _is_here(remote, here))
        else:
            found[inode] = SocketEnd(listens=local[1] not in chosen_ports)
    return found


def _read_ends(directory: str, protocol: str) -> list[tuple[_Address, _Address, int, int]]:
    rows = [
        row.split(None, 10)
        for name in (protocol, f"{protocol}6")
        for row in _read_table(f"{directory}/net/{name}").splitlines()[1:]
    ]
    return [(_end(row[1]), _end(row[2]), int(row[3], 16), int(row[9])) for row in rows]


def _is_here(address: _Address, here: Collection[bytes]) -> bool:
    return address[0] in here or address[0] == _LOOPBACK_6 or _is_loopback(address[0])


def ports_the_kernel_chooses(root: str) -> range:
    """Return the ports that the kernel gives to a program that asks for none."""
    try:
        first, last = _read_table(f"{root}/sys/net/ipv4/ip_local_port_range").split()
        return range(int(first), int(last) + 1)
    except (OSError, ValueError):
        return range(0)


def _end(text: bytes) -> tuple[bytes, int]:
    address, _, port = text.partition(b":")
    return address.removeprefix(_MAPPED), int(port, 16)


def _is_loopback(address: bytes) -> bool:
    """Tell whether an address of IPv4 is 127.0.0.0/8: the kernel writes it in the machine's order."""
    return len(address) == 8 and _LOOPBACK_4 in (address[:2], address[-2:])  # noqa: PLR2004


def _read_table(path: str) -> bytes:
    try:
        descriptor = os.open(path, READ_ONLY)
    except FileNotFoundError:
        return b""  # a kernel without IPv6
    data = bytearray()
    try:
        while chunk := os.read(descriptor, 65536):
            data += chunk
            if len(data) > _TABLE_CAP:
                raise OSError(f"{path} is too long")
    finally:
        os.close(descriptor)
    return bytes(data)


_OWN_NAMESPACE = "/proc/self/ns/net"
_LINKS_MAX = 4096
_LISTENING_CAP = 2**20
"""The maximum length of what listens in a table, in bytes: seven thousand sockets."""

_LINK = re.compile(r"socket:\[(\d{1,20})\]")


class Listener(NamedTuple):
    """A socket that listens: where one connects to it from this host, and the kernel's number for it."""

    host: str
    port: int
    inode: int


def find_listener(root: str, pid: int, port: int) -> Listener | None:
    """Return the socket on which a process listens at a port; None where that is not certain.

    It is certain only in our own network namespace: elsewhere our connection would reach another socket. And
    every socket that listens at this port must be open in this process, so that no other one can answer.
    """
    directory = f"{root}/{pid}"
    try:
        if not os.path.samestat(os.stat(f"{directory}/ns/net"), os.stat(_OWN_NAMESPACE)):  # noqa: PTH116 the hot path's way
            return None
        tables = [_read_listening(f"{directory}/net/{name}") for name in ("tcp", "tcp6")]
        listening = [each for table in tables for each in table if each.port == port]
        own = _read_sockets(directory) if listening else frozenset()
    except OSError:
        return None
    if not listening or any(each.inode not in own for each in listening):
        return None
    return listening[0]


def _read_sockets(directory: str) -> frozenset[int]:
    found = []
    for number in islice(names_in(f"{directory}/fd"), _LINKS_MAX):
        try:
            link = os.readlink(f"{directory}/fd/{number}")  # noqa: PTH115 as above
        except FileNotFoundError:
            continue  # closed meanwhile
        if match := _LINK.fullmatch(link):
            found.append(int(match[1]))
    return frozenset(found)


def _read_listening(path: str) -> list[Listener]:
    """Read listening sockets, which come first. Raises OSError if unreadable or too long."""
    found = []
    try:
        table = os.fdopen(os.open(path, READ_ONLY), "rb")
    except FileNotFoundError:
        return []  # a kernel without IPv6
    with table:
        next(table, b"")  # the heading
        for line in table:
            row = line.split(None, 10)
            if int(row[3], 16) != _LISTENS:
                break
            if table.tell() > _LISTENING_CAP:
                raise OSError(f"{path} is too long")
            address, _, port = row[1].partition(b":")
            found.append(Listener(_reachable(address), int(port, 16), int(row[9])))
    return found


def _reachable(address: bytes) -> str:
    """Return the address to connect to; the kernel writes words of 32 bits in the machine's order."""
    words = [int(address[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(address), 8)]
    packed = b"".join(words)
    if not any(packed):
        return "127.0.0.1" if len(words) == 1 else "::1"
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
