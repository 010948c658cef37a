"""Open the sockets that we listen on, or take those of systemd."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from vramledger.config import ListenAddress
from vramledger.errors import StartupError

BACKLOG = 128

_SO_PASSRIGHTS = 83
"""Whether a Unix socket takes descriptors (Linux 6.16)."""

_FIRST_DESCRIPTOR = 3
"""The first descriptor that systemd passes on (sd_listen_fds(3))."""


def listen(addresses: tuple[ListenAddress, ...]) -> list[socket.socket]:
    """Listen on all addresses. Raises StartupError if one of them cannot be listened on."""
    sockets: list[socket.socket] = []
    try:
        for address in addresses:
            sockets += _bind(address)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return sockets


def systemd_sockets() -> list[socket.socket]:
    """Take over the sockets that systemd listens on for us. Raises StartupError if systemd passed none."""
    count, pid = os.environ.pop("LISTEN_FDS", ""), os.environ.pop("LISTEN_PID", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit() or int(count) < 1:
        raise StartupError(
            "--web.systemd-socket: systemd has passed no sockets; start the exporter "
            "with a .socket unit, or use --web.listen-address"
        )
    sockets = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        os.set_inheritable(descriptor, False)  # noqa: FBT003 - the sampler has no business with it
        listening = socket.socket(fileno=descriptor)
        if (
            listening.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
            or listening.type != socket.SOCK_STREAM
            or not listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        ):
            raise StartupError(
                f"--web.systemd-socket: descriptor {descriptor} is not a listening stream; use ListenStream="
            )
        if listening.family == socket.AF_UNIX and not _refuses_descriptors(listening):
            _check_trusted(listening)
        sockets.append(listening)
    return sockets


def _refuses_descriptors(listening: socket.socket) -> bool:
    """Have the kernel refuse what clients pass beside their bytes; return whether it can."""
    try:
        listening.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def _check_trusted(listening: socket.socket) -> None:
    """Check that not every user may connect: their descriptors may hang. Raises StartupError if so."""
    path = Path(os.fsdecode(listening.getsockname()))
    try:
        open_to_all = bool(path.stat().st_mode & stat.S_IWOTH)
    except (OSError, ValueError):  # an abstract one has no permissions
        open_to_all = True
    if open_to_all:
        raise StartupError(
            f"--web.systemd-socket: every user may connect to {path}, and could freeze the exporter with a "
            "descriptor; set SocketMode=0660 in the .socket unit, or use Linux 6.16 or newer"
        )


def bound_address(listening: socket.socket) -> ListenAddress:
    """Return the address of a socket; a Unix socket's path is its host."""
    name = listening.getsockname()
    if not isinstance(name, tuple):
        return ListenAddress(os.fsdecode(name), 0)
    return ListenAddress(str(name[0]), int(name[1]))


def _bind(address: ListenAddress) -> list[socket.socket]:
    """Open the sockets of one address: one for all of IPv4 and IPv6, or one for each address of a name."""
    sockets: list[socket.socket] = []
    try:
        if not address.host:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            listening = socket.create_server(
                ("", address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
            return [listening]
        port = address.port
        for family, _, _, _, found in socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM):
            listening = socket.create_server((str(found[0]), port), family=family, backlog=BACKLOG)
            sockets.append(listening)
            port = listening.getsockname()[1]
    except (OSError, UnicodeError) as error:  # a name that IDNA cannot encode: a..b, a label of 64 letters
        for listening in sockets:
            listening.close()
        raise StartupError(_bind_error_message(address, error)) from error
    return sockets


def _bind_error_message(address: ListenAddress, error: OSError | UnicodeError) -> str:
    if isinstance(error, UnicodeError):
        return f"cannot listen on {address}: that is not a host name; correct --web.listen-address"
    if error.errno == errno.EADDRINUSE:
        return (
            f"cannot listen on {address}: the port is taken; stop what listens there "
            f"(ss -ltnp 'sport = :{address.port}') or choose another with --web.listen-address"
        )
    if error.errno == errno.EACCES:
        return (
            f"cannot listen on {address}: not permitted; choose a port above 1023 with --web.listen-address"
        )
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"cannot listen on {address}: this host has no such address; correct --web.listen-address"
    return f"cannot listen on {address}: {error.strerror or error}; correct --web.listen-address"
