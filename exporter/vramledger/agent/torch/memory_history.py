"""Answer ``vramledger snapshot``: record what PyTorch's allocator does for a while, and hand the file over.

Recording costs about two microseconds an allocation, and the snapshot at its end stops the program for as
long as it takes to copy and write it, so the number of events is bounded. What the program recorded by
itself is left alone: then the snapshot holds its history, and nothing is switched.
"""

from __future__ import annotations

import pickle
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramledger.agent import step_boundary

if TYPE_CHECKING:
    from vramledger.agent.requests import Ask

MOST_EVENTS = 100_000
"""Events at most: at 100,000 a snapshot takes 0.7 s, in which the program stands still (published)."""

USUAL_EVENTS = 10_000
LONGEST = 300.0
"""Seconds at most that somebody may record, and wait for a step."""

_EXTRA: tuple[dict[str, Any], ...] = ({"skip_actions": ["free_requested"]}, {})
# What newer versions of PyTorch take besides; the request to free says nothing that its completion does not.


def answer(ask: Ask) -> dict[str, object]:
    """Record, and write the snapshot to the file that came with the question.

    Arguments of the question: ``seconds`` to record, ``step`` true for exactly one training step (with
    ``seconds`` as the patience for each of its two ends), ``events`` at most.

    Raises:
        RuntimeError: PyTorch is missing, too old or without a GPU, or its allocator keeps no history.
        TimeoutError: no training step ended.
        ValueError: the question makes no sense.
    """
    seconds = number(ask.arguments.get("seconds"), 10.0, LONGEST, "seconds")
    events = int(number(ask.arguments.get("events"), USUAL_EVENTS, MOST_EVENTS, "events"))
    if not ask.descriptors:
        message = "no file came with the question"
        raise ValueError(message)
    torch = ready()
    theirs = _recording(torch)
    started = time.monotonic()
    if ask.arguments.get("step") is True:
        snapshot = _step(torch, events, seconds, theirs=theirs)
    else:
        snapshot = _span(torch, events, seconds, theirs=theirs)
    took = time.monotonic() - started
    with open(ask.descriptors[0], "wb", closefd=False) as file:  # it has no path
        pickle.dump(snapshot, file, protocol=4)
        size = file.tell()
    return {
        "size": size,
        "seconds": took,
        "events": sum(len(trace) for trace in snapshot.get("device_traces", [])),
        "history": "program" if theirs else "agent",
    }


def ready() -> ModuleType:
    """Return PyTorch where it is in use on a GPU.

    Raises:
        RuntimeError: it is not.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        message = "PyTorch is not loaded in this process"
        raise RuntimeError(message)
    if not torch.cuda.is_initialized():  # recording would initialise it
        message = "PyTorch has not used a GPU in this process yet"
        raise RuntimeError(message)
    return torch


def number(value: object, usual: float, most: float, name: str) -> float:
    """Return a number that somebody sent, or the usual one.

    Raises:
        ValueError: it is none, or out of bounds.
    """
    if value is None:
        return usual
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= most:
        message = f"{name} must be a number above 0 and at most {most:g}"
        raise ValueError(message)
    return value


def _recording(torch: ModuleType) -> bool:
    try:
        return bool(torch._C._cuda_isHistoryEnabled())
    except AttributeError:
        message = f"PyTorch {torch.__version__} does not tell whether it records already; 2.2 or newer does"
        raise RuntimeError(message) from None


def _start(torch: ModuleType, events: int) -> None:
    for extra in _EXTRA:
        arguments: dict[str, Any] = {
            "context": "alloc",
            "stacks": "python",  # C++ frames make a snapshot a hundred times slower, and say little
            "max_entries": events,
            **extra,
        }
        try:
            torch.cuda.memory._record_memory_history("all", **arguments)
        except TypeError:  # an older version has no such argument
            continue
        return
    message = f"PyTorch {torch.__version__} records in a way that this agent does not know"
    raise RuntimeError(message)


def _finish(torch: ModuleType, *, theirs: bool) -> dict[str, Any]:
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        if not theirs:
            _stop(torch)
    return snapshot


def _stop(torch: ModuleType) -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def _span(torch: ModuleType, events: int, seconds: float, *, theirs: bool) -> dict[str, Any]:
    """Record for so long."""
    if not theirs:
        _start(torch, events)
        time.sleep(seconds)
    return _finish(torch, theirs=theirs)


def _step(torch: ModuleType, events: int, seconds: float, *, theirs: bool) -> dict[str, Any]:
    """Record from the end of one training step to the end of the next."""
    if not theirs:
        step_boundary.run(lambda: _start(torch, events), seconds)
    try:
        snapshot = step_boundary.run(lambda: _finish(torch, theirs=theirs), seconds)
    except TimeoutError:
        if not theirs:
            _stop(torch)
        raise
    assert isinstance(snapshot, dict)  # noqa: S101 _finish returned it
    return snapshot
