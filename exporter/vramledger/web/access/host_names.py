"""Tell whether a request is for this host by a name that no stranger's web site can have (DNS rebinding).

A web page may read everything that is served under the page's own name. The owner of the name chooses its
address, which may be loopback. So an exporter that listens only on loopback, without passwords, answers only
to names that always mean this host.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from vramledger.config import ListenAddress


def names_of_loopback(
    listened: Iterable[ListenAddress], configured: Iterable[ListenAddress]
) -> frozenset[str] | None:
    """Return the names of this host that a request may have; None if other hosts may reach us, by any name.

    ``listened``: the addresses on which we listen. ``configured``: the same as they were given, also by name.
    """
    if not all(_is_loopback(each.host) for each in listened):
        return None
    return frozenset({"localhost", socket.gethostname().lower(), *(each.host.lower() for each in configured)})


@lru_cache(maxsize=64)
def is_name_of_this_host(host: str, names: frozenset[str]) -> bool:
    """Tell whether a Host header has one of the names, or an address; an empty one is not of a browser."""
    if not host:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return name in names or name.endswith(".localhost") or _is_address(name)


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ipaddress.ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
