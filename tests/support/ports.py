"""A port for a server that cannot choose a free one and report it."""

import secrets
import socket
from contextlib import suppress
from pathlib import Path

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
MANY = 12_000
RESERVED = 1024


def free_port() -> int:
    """Return a port of loopback that no program uses, below those that the kernel assigns to others."""
    lowest = int(HANDED_OUT.read_text(encoding="ascii").split()[0])
    while lowest - MANY > RESERVED:
        port = lowest - 1 - secrets.randbelow(MANY)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as free:  # this host assigns all ports
        return int(free.getsockname()[1])
