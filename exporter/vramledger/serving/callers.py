"""Decide who may request what on the control socket.

| who | may |
|---|---|
| root of the host, and the exporter's own user | everything |
| any other user of the host | read what the page shows to everybody, if it asks for no password |
| a process of a container, except the exporter's own container | nothing, also as root |
"""

from __future__ import annotations

import os
import socket
from typing import NamedTuple

from vramledger.agent_server.connection import Peer, has_ended, identify_peer
from vramledger.serving.control_messages import ControlError
from vramledger_agent.client import PROC, is_outside_containers

_ROOT = 0


def may_be_trusted(uid: int) -> bool:
    """Tell whether a process of a user may request everything if it is in no container."""
    return uid in (_ROOT, os.geteuid())


class Caller(NamedTuple):
    """A connected process: who it is, whether it may request everything, and whether it may read."""

    peer: Peer
    outside: bool

    @property
    def trusted(self) -> bool:
        """Whether it may request everything."""
        return self.outside and may_be_trusted(self.peer.uid)

    def check_read(self, *, page_open: bool) -> None:
        """Check that it may read the ledger. Raises ControlError if it may not."""
        self._check_outside()
        if not self.trusted and not page_open:
            message = (
                "the page asks for a password, so only root and the exporter's own user may read it here"
            )
            raise ControlError(message)

    def check_control(self) -> None:
        """Check that it may make the exporter do something. Raises ControlError if it may not."""
        self._check_outside()
        if not self.trusted:
            message = "only root and the exporter's own user may request that"
            raise ControlError(message)

    def _check_outside(self) -> None:
        if not self.outside:
            message = (
                "this process is in a container, or the exporter may not see it; run this on the host, or in "
                "the exporter's own container"
            )
            raise ControlError(message)


def identify_caller(connection: socket.socket) -> Caller:
    """Return who connected; the caller closes ``pidfd``. Raises RefusedError if outside or ended."""
    peer = identify_peer(connection, str(PROC))
    # If the process still runs now, the namespaces that were read were its own.
    outside = is_outside_containers(peer.pid) and not has_ended(peer.pidfd)
    return Caller(peer, outside)
