"""Run a child process that starts others for the exporter, each by its own rules.

The exporter listens on the network and has no right at all, so it cannot give a child one. Such a process
listens to nobody but the exporter, starts nothing but the children that it has declared, and ends with the
exporter. There are two, because their rights differ: the one below may read /proc, and starts the sampler
that its command line describes; that of the storage (``storage/keeper.py``) may change one directory. It is
there all the time, so it imports little: its memory counts. The modules ``signal``, ``socket`` and
``contextlib`` would take 1 MiB.
"""

from __future__ import annotations

import os
import select
import sys
from _signal import SIG_IGN, SIGCHLD, SIGINT, SIGKILL, SIGTERM, set_wakeup_fd, signal  # type: ignore[import-not-found]
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, MSG_DONTWAIT, SCM_RIGHTS, SOL_SOCKET, socket
from errno import EBUSY, EMFILE

from vramledger.sampling.capabilities import READ_CAPABILITIES, keep_only

STARTER_KILL = "kill"
"""The request to kill supervised children; any other starts a named child, with two descriptors."""

STARTER_STARTED, STARTER_FAILED, STARTER_ENDED = "started", "failed", "ended"
"""Answers about a supervised child, each with a number: its pid, an errno, its exit status."""

SAMPLER = "sampler"

_MESSAGE_BYTES = 64
_DESCRIPTORS_BYTES = 8
_IGNORED = (SIGINT, SIGTERM)
"""The exporter handles these signals, and we end with it."""


class DeclaredChild:
    """A program that the exporter may have started, and the rules for it."""

    def __init__(self, command: list[str], *, supervised: bool = False, single: bool = False) -> None:
        """Start nothing.

        ``command``: its command line. ``supervised``: the exporter is told of its start and end, can have it
        killed, and takes it along when it ends. It begins with the usual effects of signals. ``single``: the
        next one waits for its end, or is refused if this one is supervised. We wait, too, for one that is
        not.
        """
        self.command = command
        self.supervised = supervised
        self.single = single
        self.pids: list[int] = []


class StartLoop:
    """The connection to the exporter, and the children that run."""

    def __init__(self, exporter: socket, children: dict[str, DeclaredChild]) -> None:
        self._exporter = exporter
        self._children = children

    def run(self) -> None:
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
            for child in self._children.values():
                self._reap(child, os.WNOHANG)
            if not self._serve_request():
                break
        self._kill()
        for child in self._children.values():
            if child.single and not child.supervised:
                self._reap(child)

    def _reap(self, child: DeclaredChild, options: int = 0) -> None:
        for each in [*child.pids]:
            pid, status = os.waitpid(each, options)
            if pid:
                child.pids.remove(pid)
                self._answer(child, STARTER_ENDED, os.waitstatus_to_exitcode(status))

    def _serve_request(self) -> bool:
        """Do what the exporter requests, if it requests anything; tell whether it is still there."""
        space = CMSG_SPACE(_DESCRIPTORS_BYTES)
        try:
            message, ancillary, _, _ = self._exporter.recvmsg(
                _MESSAGE_BYTES, space, MSG_DONTWAIT | MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return True
        except OSError:
            return False
        descriptors = _descriptors(ancillary)
        try:
            if message == STARTER_KILL.encode():
                self._kill()
            elif (child := self._children.get(message.decode(errors="replace"))) is not None:
                if child.single and not child.supervised:
                    self._reap(child)
                if len(descriptors) != 2:  # noqa: PLR2004 we had no room for them
                    self._answer(child, STARTER_FAILED, EMFILE)
                elif child.single and child.pids:
                    self._answer(child, STARTER_FAILED, EBUSY)
                else:
                    self._start(child, *descriptors)
        finally:
            for each in descriptors:
                os.close(each)
        return bool(message)

    def _start(self, child: DeclaredChild, source: int, target: int) -> None:
        actions = [(os.POSIX_SPAWN_DUP2, source, 0), (os.POSIX_SPAWN_DUP2, target, 1)]
        default = _IGNORED if child.supervised else ()
        try:
            pid = os.posix_spawn(
                child.command[0], child.command, os.environ, file_actions=actions, setsigdef=default
            )
        except OSError as error:  # without an answer, the exporter sees that its pipes are closed
            self._answer(child, STARTER_FAILED, error.errno or 0)
        else:
            child.pids.append(pid)
            self._answer(child, STARTER_STARTED, pid)

    def _kill(self) -> None:
        for child in self._children.values():
            for pid in child.pids if child.supervised else ():
                os.kill(pid, SIGKILL)  # it has not been waited for: its pid is still its own

    def _answer(self, child: DeclaredChild, word: str, number: int) -> None:
        if child.supervised:
            try:  # noqa: SIM105 see above
                self._exporter.send(f"{word} {number}".encode())
            except OSError:  # the exporter has ended, which the next request says
                pass


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    return [
        int.from_bytes(content[at : at + 4], sys.byteorder)
        for level, kind, content in ancillary
        if level == SOL_SOCKET and kind == SCM_RIGHTS
        for at in range(0, len(content) - 3, 4)
    ]


def _log(failed: list[OSError]) -> None:
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
    sampler = DeclaredChild(sys.argv[1:], supervised=True, single=True)
    StartLoop(socket(fileno=os.dup(0)), {SAMPLER: sampler}).run()
