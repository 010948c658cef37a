"""Handle ``vramledger snapshot``: record PyTorch's memory history for a while, and write it to a file.

Recording costs about two microseconds an allocation. The snapshot at its end stops the program while it is
copied and written, so the number of events is bounded. If the program already records by itself, we do not
change that: the snapshot then holds the program's history.
"""

from __future__ import annotations

import pickle
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vramledger.agent import step_boundary
from vramledger.agent.torch.custom_allocators import custom_allocators

if TYPE_CHECKING:
    from vramledger.agent.requests import Request

MAX_EVENTS = 100_000
"""With 100,000 events a snapshot takes 0.7 s (published), and the program is stopped for that time."""

DEFAULT_EVENTS = 10_000
MAX_SECONDS = 300.0
"""The longest time that a client may ask the agent to record, or to wait for a step."""

_OPTIONAL_ARGUMENTS: tuple[dict[str, Any], ...] = ({"skip_actions": ["free_requested"]}, {})
"""Only newer versions of PyTorch accept ``skip_actions``. We skip the requests to free a block, because the
event that completes a request says the same."""


def record_snapshot(request: Request) -> dict[str, object]:
    """Record, and write the snapshot to the file that came with the request.

    Arguments of the request: ``seconds`` to record; ``step``, true for exactly one training step (``seconds``
    is then how long to wait for each of its two ends); ``events``, the maximum number of events to record.

    Raises:
        RuntimeError: PyTorch is missing, too old or without a GPU, or its allocator keeps no history.
        TimeoutError: no training step ended.
        ValueError: an argument is invalid.
    """
    seconds = request.number("seconds", 10.0, MAX_SECONDS)
    events = int(request.number("events", DEFAULT_EVENTS, MAX_EVENTS))
    if not request.descriptors:
        message = "no file came with the request"
        raise ValueError(message)
    torch = initialised_torch()
    program_records = _is_recording(torch)
    started = time.monotonic()
    if request.arguments.get("step") is True:
        snapshot = _record_step(torch, events, seconds, program_records=program_records)
    else:
        snapshot = _record_span(torch, events, seconds, program_records=program_records)
    elapsed = time.monotonic() - started
    with open(request.descriptors[0], "wb", closefd=False) as file:  # the file has no path
        pickle.dump(snapshot, file, protocol=4)
        size = file.tell()
    return {
        "size": size,
        "seconds": elapsed,
        "events": sum(len(trace) for trace in snapshot.get("device_traces", [])),
        "history": "program" if program_records else "agent",
    }


def initialised_torch() -> ModuleType:
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
    if custom_allocators(torch).exist():
        message = "the program has a memory allocator of its own, beside which PyTorch's may not be read"
        raise RuntimeError(message)
    return torch


def _is_recording(torch: ModuleType) -> bool:
    try:
        return bool(torch._C._cuda_isHistoryEnabled())
    except AttributeError:
        message = f"PyTorch {torch.__version__} does not say whether it already records; 2.2 or newer does"
        raise RuntimeError(message) from None


def _start_recording(torch: ModuleType, events: int) -> None:
    for optional in _OPTIONAL_ARGUMENTS:
        arguments: dict[str, Any] = {
            "context": "alloc",
            "stacks": "python",  # C++ frames make a snapshot a hundred times slower, and say little
            "max_entries": events,
            **optional,
        }
        try:
            torch.cuda.memory._record_memory_history("all", **arguments)
        except TypeError:  # an older version has no such argument
            continue
        return
    message = f"PyTorch {torch.__version__} records in a way that this agent does not know"
    raise RuntimeError(message)


def _take_snapshot(torch: ModuleType, *, program_records: bool) -> dict[str, Any]:
    try:
        snapshot: dict[str, Any] = torch.cuda.memory._snapshot()
    finally:
        if not program_records:
            _stop_recording(torch)
    return snapshot


def _stop_recording(torch: ModuleType) -> None:
    torch.cuda.memory._record_memory_history(enabled=None)


def _record_span(torch: ModuleType, events: int, seconds: float, *, program_records: bool) -> dict[str, Any]:
    """Record for a number of seconds."""
    if not program_records:
        _start_recording(torch, events)
        time.sleep(seconds)
    return _take_snapshot(torch, program_records=program_records)


def _record_step(torch: ModuleType, events: int, seconds: float, *, program_records: bool) -> dict[str, Any]:
    """Record from the end of one training step to the end of the next."""
    if not program_records:
        step_boundary.run(lambda: _start_recording(torch, events), seconds)
    try:
        snapshot = step_boundary.run(lambda: _take_snapshot(torch, program_records=program_records), seconds)
    except TimeoutError:
        if not program_records:
            _stop_recording(torch)
        raise
    assert isinstance(snapshot, dict)  # noqa: S101 _take_snapshot returned it
    return snapshot
