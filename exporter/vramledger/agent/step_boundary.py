"""Run something on the program's own thread between two training steps, where a pause hurts least.

What ends a step (the optimizer's hook, see ``torch.optimizer_steps``) calls :func:`run_pending`. Another
thread that needs this moment calls :func:`run` and waits for it.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable

# Use _thread's lock instead of threading's events: nothing here can wait for a lock that the program holds.


class _PendingCall:
    """A function that waits for the boundary, and its outcome."""

    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.result: object = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()
        self.done.acquire()


_pending: list[_PendingCall] = []


def run_pending() -> None:
    """Run what waits for the end of a step, now and on this thread: the program is between two steps.

    A function that is added meanwhile waits for the next boundary: a caller that runs two wants two steps.
    """
    for _ in range(len(_pending)):
        try:
            call = _pending.pop(0)
        except IndexError:  # withdrawn at this moment
            return
        try:
            call.result = call.function()
        except BaseException as error:
            call.error = error
        call.done.release()


def run(function: Callable[[], object], seconds: float) -> object:
    """Run a function at the next step boundary, and return what it returned.

    Raises:
        TimeoutError: there was no step within that many seconds; the function will not run any more.
        BaseException: what the function raised.
    """
    call = _PendingCall(function)
    _pending.append(call)
    if not call.done.acquire(timeout=seconds):
        try:
            _pending.remove(call)
        except ValueError:  # the function is running: wait for it
            call.done.acquire()
        else:
            message = f"no training step ended within {seconds:g} s"
            raise TimeoutError(message)
    if call.error is not None:
        raise call.error
    return call.result


def drop_pending() -> None:
    """Drop the functions that wait: after a fork no thread of the child waits for them."""
    _pending.clear()
