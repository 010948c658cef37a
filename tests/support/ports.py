"""A port for a server that cannot be told to take any, and to say which."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
MANY = 12_000
RESERVED = 1024


def free_port() -> int:
    """Return a port of loopback that nobody listens on, below those that the kernel hands out.

    One of the kernel's own would be free as well, and now and then another program's before the server that
    it is meant for takes it: tests run side by side, and each of them opens connections and servers.
    """
    lowest = int(HANDED_OUT.read_text(encoding="ascii").split()[0])
    while lowest - MANY > RESERVED:
        port = lowest - 1 - secrets.randbelow(MANY)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as free:  # this host hands out all
        return int(free.getsockname()[1])
