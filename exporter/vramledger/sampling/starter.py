"""Run the child process that starts samplers for the exporter, and end them.

The exporter listens on the network and has no right at all, so it cannot give a sampler one. This process has
the rights to read /proc, listens to nobody but the exporter, and does only two things: it starts the sampler
that its own command line describes, and it kills that. It ends with the exporter, and so does the sampler.
"""

from __future__ import annotations

import array
import os
import select
import signal
import socket
import sys
from contextlib import suppress

from vramledger.logs import configure
from vramledger.sampling.privileges import READ_CAPABILITIES, drop_privileges
from vramledger.sampling.protocol import (
    STARTER_ENDED,
    STARTER_FAILED,
    STARTER_KILL,
    STARTER_START,
    STARTER_STARTED,
    sampler_command,
)

_MESSAGE_BYTES = 64
_IGNORED = (signal.SIGINT, signal.SIGTERM)
"""The exporter handles these signals, and we end with it."""


class _RequestLoop:
    """The connection to the exporter, and the sampler that runs."""

    def __init__(self, exporter: socket.socket, arguments: list[str]) -> None:
        self._exporter = exporter
        self._command = sampler_command(*arguments)
        self._sampler: int | None = None

    def run(self) -> None:
        """Serve the exporter until it ends."""
        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (self._exporter.fileno(), ended):
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.poll()
            with suppress(BlockingIOError):
                os.read(ended, 4096)
            self._reap()
            if not self._serve_request():
                self._kill()
                return

    def _reap(self) -> None:
        while self._sampler is not None:
            pid, status = os.waitpid(self._sampler, os.WNOHANG)
            if pid == 0:
                return
            self._sampler = None
            self._answer(f"{STARTER_ENDED} {os.waitstatus_to_exitcode(status)}")

    def _serve_request(self) -> bool:
        """Do what the exporter requests, if it requests anything; tell whether it is still there."""
        space = socket.CMSG_SPACE(array.array("i").itemsize)
        try:
            message, ancillary, _, _ = self._exporter.recvmsg(_MESSAGE_BYTES, space, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        output = _descriptor(ancillary)
        try:
            if message == STARTER_START.encode() and output is not None and self._sampler is None:
                self._start(output)
            elif message == STARTER_KILL.encode():
                self._kill()
        finally:
            if output is not None:
                os.close(output)
        return bool(message)

    def _start(self, output: int) -> None:
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, output, 1),
        ]
        try:
            self._sampler = os.posix_spawn(
                self._command[0], self._command, os.environ, file_actions=actions, setsigdef=_IGNORED
            )
        except OSError as error:
            self._answer(f"{STARTER_FAILED} {error.errno}")
        else:
            self._answer(f"{STARTER_STARTED} {self._sampler}")

    def _kill(self) -> None:
        if self._sampler is not None:
            with suppress(ProcessLookupError):
                os.kill(self._sampler, signal.SIGKILL)

    def _answer(self, message: str) -> None:
        with suppress(OSError):  # the exporter has ended, which the next request says
            self._exporter.send(message.encode())


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            return array.array("i", content)[0]
    return None


def main() -> None:
    """Serve the exporter at the other end of standard input until it ends."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    configure(*sys.argv[2:4])
    drop_privileges(inherit=READ_CAPABILITIES)
    with socket.socket(fileno=os.dup(0)) as exporter:
        _RequestLoop(exporter, sys.argv[1:]).run()


if __name__ == "__main__":
    main()
