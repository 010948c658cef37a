"""Handle ``vramledger snapshot``: record PyTorch's memory history for a while, and write it to a file.

Recording costs about two microseconds an allocation. The snapshot at its end stops the program while it is
copied and written, so the number of events is bounded. The end of a step is on the program's own thread,
where its tensors can be read. A snapshot at any other moment is taken on a thread of ours, while the program
goes on, and so without them.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from vramledger_agent import step_boundary
from vramledger_agent.torch.custom_allocators import custom_allocators
from vramledger_agent.torch.cycles import collect_cycles
from vramledger_agent.torch.recording import DEFAULT_EVENTS, TakenSnapshot, is_history_enabled, recording

if TYPE_CHECKING:
    from vramledger_agent.requests import Request

MAX_EVENTS = 100_000
"""With 100,000 events a snapshot takes 0.7 s (published), and the program is stopped for that time."""

MAX_SECONDS = 300.0
"""The longest time that a client may ask the agent to record, or to wait for a step."""


def record_snapshot(request: Request) -> dict[str, object]:
    """Record, and write the snapshot to the file that came with the request.

    Arguments of the request: ``seconds`` to record; ``step``, true for exactly one training step (``seconds``
    is then how long to wait for each of its two ends); ``events``, the maximum number of events to record;
    ``cycles``, true to run the collector at the end of that step and to say what it has freed. Raises
    RuntimeError if PyTorch is missing, too old or without a GPU, its allocator keeps no history, or it would
    import a part of itself. Raises TimeoutError if no training step ended. Raises ValueError if an argument
    is invalid.
    """
    seconds = request.number("seconds", 10.0, MAX_SECONDS)
    events = int(request.number("events", DEFAULT_EVENTS, MAX_EVENTS))
    if not request.descriptors:
        message = "no file came with the request"
        raise ValueError(message)
    torch = initialised_torch()
    origin = _find_origin(torch)
    started = time.monotonic()
    find_cycles = request.arguments.get("cycles") is True
    step = request.arguments.get("step") is True or find_cycles
    cycles: dict[str, object] = {}
    taken = _record(
        torch,
        events,
        seconds,
        step=step,
        ours=origin != "program",
        before=(lambda: cycles.update(collect_cycles(torch))) if find_cycles else None,
    )
    elapsed = time.monotonic() - started
    if not recording.active and is_history_enabled(torch):
        origin = "program"  # its recording has replaced ours
    recording.annotate(taken, **({"garbage": cycles} if find_cycles else {}))
    with open(request.descriptors[0], "wb", closefd=False) as file:  # the file has no path
        pickle.dump(taken.snapshot, file, protocol=4)
        size = file.tell()
    return {
        "size": size,
        "seconds": elapsed,
        "events": sum(len(trace) for trace in taken.snapshot.get("device_traces", [])),
        "history": origin,
    }


def _find_origin(torch: ModuleType) -> str:
    """Return whose recording a snapshot will have: ``program``, ``start`` (ours, goes on) or ``agent``."""
    if recording.is_active(torch):
        return "start"
    return "program" if is_history_enabled(torch) else "agent"


def initialised_torch() -> ModuleType:
    """Return PyTorch where it is in use on a GPU. Raises RuntimeError if it is not."""
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


def _record(  # noqa: PLR0913
    torch: ModuleType,
    events: int,
    seconds: float,
    *,
    step: bool,
    ours: bool,
    before: Callable[[], None] | None,
) -> TakenSnapshot:
    """Record for a number of seconds, or from the end of one training step to the end of the next.

    If a recording already runs, take the snapshot at once, or at the next end of a step. The tensors are read
    only at the end of a step.
    """
    begins = ours and not recording.is_active(torch)

    def begin() -> None:
        recording.begin(torch, events, boundary=step)

    def take_snapshot() -> object:
        taken = None
        try:
            if before is not None:
                before()
            taken = recording.take_snapshot(torch, tensors=step)
            return taken
        finally:
            if begins:
                recording.end(torch, None if taken is None else taken.snapshot)

    if not step:
        if begins:
            begin()
            time.sleep(seconds)
        result = take_snapshot()
    else:
        try:
            if begins:
                result = step_boundary.run_both(begin, take_snapshot, seconds)
            else:
                result = step_boundary.run(take_snapshot, seconds)
        except TimeoutError:
            if begins:
                recording.end(torch)
            raise
    assert isinstance(result, TakenSnapshot)  # noqa: S101 take_snapshot() returned it
    return result
