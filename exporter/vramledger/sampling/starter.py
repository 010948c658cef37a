"""Run the child process that starts samplers for the exporter, and end them.

The exporter listens on the network and has no right at all, so it cannot give a sampler one. This process has
the rights to read /proc, listens to nobody but the exporter, and does only two things: it starts the sampler
that its own command line describes, and it kills that. It ends with the exporter, and so does the sampler.

It is there all the time, so it imports little: its memory counts. The modules ``signal``, ``socket`` and
``contextlib`` would take 1 MiB.
"""

from __future__ import annotations

import os
import select
import sys
from _signal import SIG_IGN, SIGCHLD, SIGINT, SIGKILL, SIGTERM, set_wakeup_fd, signal  # type: ignore[import-not-found]
from _socket import CMSG_SPACE, MSG_DONTWAIT, SCM_RIGHTS, SOL_SOCKET, socket

from vramledger.sampling.capabilities import READ_CAPABILITIES, keep_only

STARTER_START, STARTER_KILL = "start", "kill"
"""The requests of the exporter; a descriptor for the sampler's output comes with the first."""

STARTER_STARTED, STARTER_FAILED, STARTER_ENDED = "started", "failed", "ended"
"""The answers, each with a number: the sampler's pid, an error of the system, the sampler's exit status."""

_MESSAGE_BYTES = 64
_DESCRIPTOR_BYTES = 4
_IGNORED = (SIGINT, SIGTERM)
"""The exporter handles these signals, and we end with it."""


class _RequestLoop:
    """The connection to the exporter, and the sampler that runs."""

    def __init__(self, exporter: socket, command: list[str]) -> None:
        self._exporter = exporter
        self._command = command
        self._sampler: int | None = None

    def run(self) -> None:
        """Serve the exporter until it ends."""
        ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        set_wakeup_fd(wake)
        signal(SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (self._exporter.fileno(), ended):
            poll.register(descriptor, select.POLLIN)
        while True:
            poll.poll()
            try:  # noqa: SIM105 see above
                os.read(ended, 4096)
            except BlockingIOError:
                pass
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
        space = CMSG_SPACE(_DESCRIPTOR_BYTES)
        try:
            message, ancillary, _, _ = self._exporter.recvmsg(_MESSAGE_BYTES, space, MSG_DONTWAIT)
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
            os.kill(self._sampler, SIGKILL)  # it has not been waited for: its pid is still its own

    def _answer(self, message: str) -> None:
        try:  # noqa: SIM105 see above
            self._exporter.send(message.encode())
        except OSError:  # the exporter has ended, which the next request says
            pass


def _descriptor(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    for level, kind, content in ancillary:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            return int.from_bytes(content[:_DESCRIPTOR_BYTES], sys.byteorder)
    return None


def _log(failed: list[OSError]) -> None:
    """Log what we could not give up."""
    from vramledger.logs import configure  # noqa: PLC0415 3 MiB, saved where nothing fails
    from vramledger.sampling.privileges import log_failures  # noqa: PLC0415 the same

    configure(*sys.argv[-2:])  # the sampler's last arguments
    log_failures(failed)


def main() -> None:
    """Serve the exporter at the other end of standard input until it ends."""
    for number in _IGNORED:
        signal(number, SIG_IGN)
    if failed := keep_only(inherit=READ_CAPABILITIES):
        _log(failed)
    _RequestLoop(socket(fileno=os.dup(0)), sys.argv[1:]).run()
