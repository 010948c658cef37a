"""The addresses that this host has beside those of loopback."""

import ipaddress
import socket

import psutil

from tests.support.requirements import do_without


def own_addresses() -> list[str]:
    """Return one address of each kind; a test does without if there are none."""
    found = [each.address for addresses in psutil.net_if_addrs().values() for each in addresses
             if each.family in (socket.AF_INET, socket.AF_INET6)]  # fmt: skip
    kinds = {
        (parsed.version, parsed.is_link_local): address
        for address in found
        if not (parsed := ipaddress.ip_address(address.partition("%")[0])).is_loopback
    }
    return list(kinds.values()) or do_without("this host has only loopback")


def bind_to_interface(made: socket.socket, address: str) -> None:
    """Bind a socket to the interface that has an address: lo for those of loopback."""
    own = address.removeprefix("::ffff:")
    named = psutil.net_if_addrs().items()
    interface = next((name for name, found in named if own in [each.address for each in found]), "lo")
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
