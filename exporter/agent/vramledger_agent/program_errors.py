"""Pass on to the program what its own signal handlers raise while our code runs on its thread.

Python runs a signal handler between two instructions of the main thread, also when these are ours. What the
handler raises belongs to the program. Where our caller passes exceptions on, we raise it again. Python throws
away what a hook of a fork raises; there the exception waits until the fork has ended.

Threads of ours block signals, so that each reaches the thread that the program meant.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal itself loads enum
import _thread
import os
from collections import deque
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

MAX_CALLS_AT_ONCE = 32
"""A hook that more threads call in the same moment is not run for the others, and Python says so."""

_caught_in_hooks: list[BaseException] = []
"""The program's exceptions that wait until a fork has ended."""


def belongs_to_program(error: BaseException) -> bool:
    """Return whether an exception that was caught here is the program's, and no error of ours."""
    return isinstance(error, KeyboardInterrupt) or _handler_part(error) is not None


def _handler_part(error: BaseException) -> TracebackType | None:
    """Return the traceback from the signal handler on; None if no handler raised the exception."""
    entry = error.__traceback__
    while entry is not None and entry.tb_next is not None:
        called = entry.tb_next
        if _has_argument(called.tb_frame, entry.tb_frame) or called.tb_frame.f_code in _handler_codes():
            return called
        entry = called
    return None


def _has_argument(frame: FrameType, interrupted: FrameType) -> bool:
    """Return whether a function was called with its caller's frame, as Python calls a signal handler."""
    for value in tuple(frame.f_locals.values()):
        if value is interrupted:
            return True
        if type(value) is tuple and any(each is interrupted for each in value):
            return True
    return False


def _handler_codes() -> set[object]:
    found: set[object] = set()
    for number in _signal.valid_signals():
        handler = _signal.getsignal(number)
        while hasattr(handler, "func"):  # functools.partial
            handler = handler.func
        handler = getattr(handler, "__func__", handler)
        if not hasattr(handler, "__code__"):
            handler = vars(type(handler)).get("__call__")
        found.add(getattr(handler, "__code__", None))
    return found - {None}


def make_hook(function: Callable[[], object], count_error: Callable[[], None]) -> Callable[[], object]:
    """Return a callable for a caller that ignores exceptions; threads may call it at the same time.

    It runs a function, counts its errors, and keeps the exceptions of signal handlers for
    :func:`raise_caught`. Each call goes on with a generator of its own, because Python runs signal handlers
    also at the first instruction of a function, before any ``try``. A generator goes on inside its ``try``.
    Until then no instruction of Python runs: to take the generator and to call it is C alone.
    """
    waiting: deque[Iterator[None]] = deque()

    def fill() -> None:
        while len(waiting) < MAX_CALLS_AT_ONCE:
            steps = _run_once(function, count_error, fill)
            next(steps)
            waiting.append(steps)

    fill()
    return map(next, iter(waiting.popleft, None)).__next__


def _run_once(
    function: Callable[[], object], count_error: Callable[[], None], fill: Callable[[], None]
) -> Iterator[None]:
    """Run the function at the second step, and make the generators of later calls."""
    try:
        try:
            yield
            function()
        except GeneratorExit:  # the interpreter ends
            return
        except BaseException as error:
            keep_or_count(error, count_error)
        fill()
    except BaseException as error:  # one more signal, while the first one's exception was handled
        keep_or_count(error, count_error)
    yield


def keep_or_count(error: BaseException, count_error: Callable[[], None]) -> None:
    """Keep an exception of the program for :func:`raise_caught`, or count an error of ours."""
    if belongs_to_program(error):
        _caught_in_hooks.append(error)
    else:
        count_error()


def raise_caught() -> None:
    """Raise the first exception that a hook has kept, without our part of its traceback."""
    if _caught_in_hooks:
        error = _caught_in_hooks[0]
        _caught_in_hooks.clear()
        raise error.with_traceback(_handler_part(error))


def forget_caught() -> None:
    """Drop the kept exceptions in a forked child, because the signal was for the parent."""
    _caught_in_hooks.clear()


class _MainThreadCall:
    """A queued function: the main thread calls it by a test of this object's truth."""

    __slots__ = ("count_error", "function")

    def __init__(self, function: Callable[[], object], count_error: Callable[[], None]) -> None:
        self.function = function
        self.count_error = count_error

    def __bool__(self) -> bool:
        try:
            self.function()
        except BaseException as error:
            if belongs_to_program(error):
                raise
            self.count_error()
        return False


_main_thread_calls: list[_MainThreadCall] = []
"""Kept here, because Python's queue holds no references."""


def make_main_thread_call(
    function: Callable[[], object], count_error: Callable[[], None]
) -> Callable[[], object]:
    """Return a callable that queues a function, which the main thread calls soon after.

    No instruction of Python runs in the callable itself, so no exception can be lost in it. Raises
    ImportError if this Python has no ``ctypes``.
    """
    import ctypes

    call = _MainThreadCall(function, count_error)
    _main_thread_calls.append(call)
    python = ctypes.pythonapi
    # Py_AddPendingCall takes a function of one pointer that returns -1 for an exception: this one fits.
    ask = ctypes.cast(python.PyObject_IsTrue, ctypes.c_void_p)
    return partial(python.Py_AddPendingCall, ask, ctypes.py_object(call))


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
