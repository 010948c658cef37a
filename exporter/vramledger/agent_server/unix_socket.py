"""The path at which the exporter listens for agents: made, taken over from a dead exporter, given up."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from vramledger.errors import StartupError

_BACKLOG = 128
_EVERYBODY = 0o666
_DIRECTORY = 0o755


class SocketFile:
    """A listening socket at a path; the file is removed at the end if it is still ours."""

    def __init__(self, path: Path) -> None:
        """Listen.

        Raises:
            StartupError: that is not possible here; the message says what to do.
        """
        self.path = path
        self.socket = _listen(path)
        self._identity = _identity(path)

    def close(self) -> None:
        """Stop listening; a file that another exporter has put there stays."""
        self.socket.close()
        if _identity(self.path) == self._identity:
            with suppress(OSError):
                self.path.unlink()


def _identity(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.lstat()
        return found.st_dev, found.st_ino
    return None


def _listen(path: Path) -> socket.socket:
    remedy = "correct --agent.socket, or give --no-collector.agent"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    # Bound under a name of its own and moved into place: nobody ever finds a socket that is not ready, and
    # a stale one is replaced in one step.
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if not path.parent.exists():
            path.parent.mkdir()
            path.parent.chmod(_DIRECTORY)
        _check_free(path)
        listening.setblocking(False)  # noqa: FBT003 the standard library's
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        with suppress(FileNotFoundError):
            new.unlink()
        listening.bind(str(new))
        new.chmod(_EVERYBODY)
        listening.listen(_BACKLOG)
        new.replace(path)
    except (OSError, ValueError) as error:
        listening.close()
        with suppress(OSError, ValueError):
            new.unlink()
        said = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        message = f"cannot listen for agents at {path}: {said}; {remedy}"
        raise StartupError(message) from error
    except StartupError:
        listening.close()
        raise
    return listening


def _check_free(path: Path) -> None:
    """See that nothing is at the path but a socket that nobody listens at any more."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        message = f"cannot listen for agents at {path}: it is no socket; move it away"
        raise StartupError(message)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)  # noqa: FBT003 the standard library's
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # stale: its exporter was killed
        except BlockingIOError:
            pass  # somebody listens, and has much to do
    message = (
        f"cannot listen for agents at {path}: another exporter does; stop it, or choose another path"
        " by --agent.socket"
    )
    raise StartupError(message)
