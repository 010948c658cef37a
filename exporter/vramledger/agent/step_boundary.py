"""Run something on the program's own thread between two training steps, where a pause hurts least.

Who steps (the optimizer's hook, see ``pytorch``) calls :func:`reached`; who needs the moment calls
:func:`run` from another thread and waits for it.
"""

from __future__ import annotations

import _thread

TYPE_CHECKING = False
if TYPE_CHECKING:  # a program that uses no framework need not load it
    from collections.abc import Callable

# _thread's lock instead of threading's events: nothing here can meet a lock that the program holds.


class _Job:
    """A function that waits for the boundary, and what became of it."""

    __slots__ = ("done", "error", "function", "result")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.result: object = None
        self.error: BaseException | None = None
        self.done = _thread.allocate_lock()
        self.done.acquire()


_jobs: list[_Job] = []


def reached() -> None:
    """Say that the program is between two steps: what waits for that runs now, on this thread.

    What comes to wait meanwhile waits for the next boundary: whoever asks twice wants two steps.
    """
    for _ in range(len(_jobs)):
        try:
            job = _jobs.pop(0)
        except IndexError:  # withdrawn at this moment
            return
        try:
            job.result = job.function()
        except BaseException as error:
            job.error = error
        job.done.release()


def run(function: Callable[[], object], seconds: float) -> object:
    """Run a function at the next step boundary, and return what it returned.

    Raises:
        TimeoutError: there was no step within so many seconds; the function will not run any more.
        BaseException: what the function raised.
    """
    job = _Job(function)
    _jobs.append(job)
    if not job.done.acquire(timeout=seconds):
        try:
            _jobs.remove(job)
        except ValueError:  # it has begun: wait for it
            job.done.acquire()
        else:
            message = f"no training step ended within {seconds:g} s"
            raise TimeoutError(message)
    if job.error is not None:
        raise job.error
    return job.result


def forget() -> None:
    """Drop what waits: after a fork the child has no thread that waits for it."""
    _jobs.clear()
