"""Run something on the program's own thread between two training steps, where a pause hurts least.

What ends a step (the optimizer's hook, see ``torch.optimizer_steps``) calls :func:`run_pending`.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable

from vramledger_agent.program_errors import belongs_to_program

# Use _thread's lock instead of threading's events: nothing here can wait for a lock that the program holds.

WITHDRAWN = -1
"""The owner of a call whose caller no longer waits for it."""


class _PendingCall:
    """A function that waits for the boundary, and its outcome; no signal can interrupt its claim."""

    __slots__ = ("_owner", "done", "error", "function", "result")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.result: object = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()  # held until the function has run
        self.done.acquire()
        self._owner: dict[str, int] = {}

    def claim(self, owner: int) -> bool:
        return self._owner.setdefault("owner", owner) == owner

    def is_owned_by(self, owner: int) -> bool:
        return self._owner.get("owner") == owner


_pending: list[_PendingCall] = []


def is_awaited() -> bool:
    return bool(_pending)


def run_pending() -> None:
    """Run what waits for the end of a step, now and on this thread: the program is between two steps.

    A function that is added meanwhile waits for the next boundary: a caller that runs two wants two steps. An
    error of the function is its caller's. What a signal handler of the program raises meanwhile is raised
    here, in the program.
    """
    for call in tuple(_pending):
        _run(call, _thread.get_ident())


def _run(call: _PendingCall, ident: int) -> None:
    try:
        if call.claim(ident):
            call.error = InterruptedError("a signal of the program came in between; ask again")
            call.result = call.function()
            call.error = None
    except BaseException as error:
        if belongs_to_program(error):
            raise
        call.error = error
    finally:
        if call.is_owned_by(ident) and call in _pending:
            _pending.remove(call)
            call.done.release()


def run(function: Callable[[], object], seconds: float) -> object:
    """Run a function at the next step boundary, and return what it returned.

    Raises TimeoutError if there was no step within that many seconds; the function will not run any more.
    Raises BaseException: what the function raised.
    """
    call = _PendingCall(function)
    _pending.append(call)
    return _wait(call, seconds)


def run_both(first: Callable[[], object], second: Callable[[], object], seconds: float) -> object:
    """Run a function at a step boundary, another at the next; return its result. Raises as :func:`run`."""
    following = _PendingCall(second)

    def run_first() -> None:
        first()
        _pending.append(following)  # here: a step may end before the calling thread goes on

    run(run_first, seconds)
    return _wait(following, seconds)


def _wait(call: _PendingCall, seconds: float) -> object:
    if not call.done.acquire(timeout=seconds):
        if call.claim(WITHDRAWN):
            _pending.remove(call)
            raise TimeoutError(f"no training step ended within {seconds:g} s")
        call.done.acquire()  # it is running
    if call.error is not None:
        raise call.error
    return call.result


def drop_pending() -> None:
    """Drop the functions that wait: after a fork no thread of the child waits for them."""
    _pending.clear()
