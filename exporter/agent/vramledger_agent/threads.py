"""Start threads that no signal reaches, and count the threads of this process."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself loads enum
import _thread
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable

_OWN_FAULTS = {
    *(_signal.SIGSEGV, _signal.SIGBUS, _signal.SIGFPE, _signal.SIGILL),
    *(_signal.SIGTRAP, _signal.SIGABRT, _signal.SIGSYS),
}
"""The signals that a thread causes itself; ``faulthandler`` must see those of ours too."""

_BLOCKED = frozenset(_signal.valid_signals()) - _OWN_FAULTS

TASKS = "/proc/self/task"


def start_thread(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Start a bare thread that blocks signals, so that each reaches the thread that the program meant.

    A program that blocks a signal and waits for it in ``sigwait`` would lose it to a thread that does not
    block it. A new thread has the mask of its creator. A mask that the thread set itself would come too late.
    Raises RuntimeError if no thread is available.
    """
    # With no signals this only reads the mask. If a pending signal's handler raises below, the mask has
    # already been changed, so it must be known before.
    before = _signal.pthread_sigmask(_signal.SIG_BLOCK, ())
    try:
        _signal.pthread_sigmask(_signal.SIG_BLOCK, _BLOCKED)
        _thread.start_new_thread(function, arguments)
    finally:
        _signal.pthread_sigmask(_signal.SIG_SETMASK, before)


def count_threads() -> int | None:
    """Return how many threads the kernel counts in this process, None if that cannot be read."""
    try:
        return os.stat(TASKS).st_nlink - 2
    except OSError:
        return None


def has_thread(native_id: int) -> bool:
    return os.path.exists(f"{TASKS}/{native_id}")
