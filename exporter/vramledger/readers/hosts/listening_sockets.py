"""Find where a process listens for TCP connections, as the kernel attests it."""

from __future__ import annotations

import os
import re
import socket
from itertools import islice
from typing import NamedTuple

from vramledger.readers.hosts.stat import READ_ONLY, names_in

_OWN_NAMESPACE = "/proc/self/ns/net"
_LISTEN = b"0A"
_LINKS_MAX = 4096
_TABLE_CAP = 1024 * 1024
"""The maximum length of a table, in bytes: seven thousand sockets that listen."""

_SOCKET = re.compile(r"socket:\[(\d{1,20})\]")
_ROW = re.compile(
    rb"\s*\d+: (?P<address>[0-9A-F]{8}|[0-9A-F]{32}):(?P<port>[0-9A-F]{4}) \S+ (?P<state>\S\S) (?P<rest>.*)"
)
_INODE_FIELD = 5
"""Which of the fields after the state is the number of the socket."""


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
    """Return the numbers of the sockets that a process has open."""
    found = []
    for number in islice(names_in(f"{directory}/fd"), _LINKS_MAX):
        try:
            link = os.readlink(f"{directory}/fd/{number}")  # noqa: PTH115 as above
        except FileNotFoundError:
            continue  # closed meanwhile
        if match := _SOCKET.fullmatch(link):
            found.append(int(match[1]))
    return frozenset(found)


def _read_listening(path: str) -> list[Listener]:
    """Read listening sockets, which come first. Raises OSError if unreadable or too long."""
    found = []
    try:
        descriptor = os.open(path, READ_ONLY)
    except FileNotFoundError:
        return []  # a kernel without IPv6
    with os.fdopen(descriptor, "rb") as table:
        next(table, b"")  # the heading
        for line in table:
            match = _ROW.match(line)
            if match is None or match["state"] != _LISTEN:
                break
            if table.tell() > _TABLE_CAP:
                message = f"{path} is too long"
                raise OSError(message)
            inode = int(match["rest"].split()[_INODE_FIELD])
            found.append(Listener(_reachable(match["address"]), int(match["port"], 16), inode))
    return found


def _reachable(address: bytes) -> str:
    """Return the address to connect to; the kernel writes words of 32 bits in the machine's order."""
    words = [int(address[at : at + 8], 16).to_bytes(4, "little") for at in range(0, len(address), 8)]
    packed = b"".join(words)
    if not any(packed):
        return "127.0.0.1" if len(words) == 1 else "::1"
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
