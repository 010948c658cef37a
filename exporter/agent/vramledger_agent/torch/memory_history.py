"""Handle what may be asked of PyTorch: ``snapshot`` records its memory history, ``reclaim`` frees its cache.

Recording costs about two microseconds an allocation. The snapshot at its end stops the program while it is
copied and written, so the number of events is bounded. The end of a step is on the program's own thread,
where its tensors can be read. A snapshot at any other moment is taken on a thread of ours, while the program
goes on, and so without them.

Reference cycles that keep GPU memory are found by one run of the collector with the flag that keeps what it
finds, on the program's own thread and at the end of a step; what was kept is dropped at once. Finalisers and
weak references behave as in any collection.

To reclaim, the collector runs, then the cache is emptied: the memory of tensors in dead reference cycles
becomes cache only once the collector has freed them. Both run on the program's own thread, where its
finalizers expect to run and no kernel launch is half done. The next steps allocate from the driver again.
"""

from __future__ import annotations

import gc
import pickle
import sys
import time
import types
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from vramledger_agent import step_boundary
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.user_code import FRAMEWORK, code_origin
from vramledger_agent.requests import Request
from vramledger_agent.torch.recording import (
    DEFAULT_EVENTS,
    TakenSnapshot,
    custom_allocators,
    is_history_enabled,
    recording,
    take_without_import,
)
from vramledger_agent.torch.step_peaks import live_blocks

MAX_CYCLES = 10
MAX_OBJECTS = 8
Garbage = list[Any]


def collect_cycles(torch: ModuleType) -> dict[str, Any]:
    """Free the garbage of the cyclic collector, and return what it held of GPU memory.

    Returns ``blocks``: device, address, bytes and frames of each block that became free; ``cycles``: the
    largest groups of objects that referred to each other, with their bytes and the code that made them.
    """
    before = _blocks(torch)
    garbage = _keep_garbage()
    try:
        cycles = _describe(torch, garbage)
    finally:
        garbage.clear()
    gc.collect()
    after = _blocks(torch)
    return {"blocks": [block for key, block in before.items() if key not in after], "cycles": cycles}


def _blocks(torch: ModuleType) -> dict[tuple[int, int], dict[str, Any]]:
    snapshot = take_without_import(torch, torch.cuda.memory._snapshot, own_thread=True)
    devices = {segment.get("device", 0) for segment in snapshot["segments"]}
    return {
        (device, address): {"device": device, "size": size, "frames": block.get("frames") or []}
        for device in devices
        for address, size, block in live_blocks(snapshot, device)
    }


def _keep_garbage() -> Garbage:
    flags, kept = gc.get_debug(), len(gc.garbage)
    try:
        gc.set_debug(flags | gc.DEBUG_SAVEALL)
        gc.collect()
        return gc.garbage[kept:]
    finally:  # also when a signal handler of the program raises
        gc.set_debug(flags)
        del gc.garbage[kept:]


def _describe(torch: ModuleType, garbage: Garbage) -> list[dict[str, object]]:
    found: dict[str, dict[str, Any]] = {}
    for group in _groups(garbage):
        size = sum(_sizes(torch, group).values())
        if size:
            objects = _objects(group)
            entry = found.setdefault(
                str(objects), {"bytes": 0, "cycles": 0, "count": len(group), "objects": objects}
            )
            entry["bytes"] += size
            entry["cycles"] += 1
    return sorted(found.values(), key=lambda entry: -int(entry["bytes"]))[:MAX_CYCLES]


def _groups(garbage: Garbage) -> list[Garbage]:
    """Split objects into groups that refer to each other, directly or through others."""
    numbers = {id(each): number for number, each in enumerate(garbage)}
    parents = list(range(len(garbage)))

    def root(number: int) -> int:
        while parents[number] != number:
            parents[number] = parents[parents[number]]
            number = parents[number]
        return number

    for number, each in enumerate(garbage):
        for referred in gc.get_referents(each):
            other = numbers.get(id(referred))
            if other is not None:
                parents[root(other)] = root(number)
    groups: dict[int, Garbage] = {}
    for number, each in enumerate(garbage):
        groups.setdefault(root(number), []).append(each)
    return list(groups.values())


def _sizes(torch: ModuleType, group: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of a group's tensors on a GPU, by address: two tensors may share their memory."""
    found: dict[int, int] = {}
    for each in group:
        if torch.Tensor not in type(each).__mro__:
            continue
        try:
            if each.device.type == "cuda":
                address, size = int(each.data_ptr()), int(each.nbytes)
                found[address] = max(size, found.get(address, 0))
        except (AttributeError, RuntimeError, TypeError) as error:
            if belongs_to_program(error):
                raise
    return found


def _objects(group: Garbage) -> list[dict[str, object]]:
    found: dict[tuple[object, ...], dict[str, object]] = {}
    for each in group:
        code, line = _code(each)
        if code is None:
            continue
        file = code.co_filename
        if code_origin(file) == FRAMEWORK:
            continue
        entry: dict[str, object] = {
            "type": type(each).__name__,
            "file": file,
            "line": line or code.co_firstlineno,
        }
        entry["function"] = code.co_name
        found.setdefault(tuple(entry.values()), entry)
    return list(found.values())[:MAX_OBJECTS]


def _code(each: Any) -> tuple[types.CodeType | None, int | None]:  # noqa: ANN401 it may be anything
    """Return the code of an object or of its class, and the line where known; run no code of the program."""
    kind = type(each)
    if kind is types.MethodType:
        each = each.__func__
        kind = type(each)
    if kind is types.TracebackType:
        return each.tb_frame.f_code, each.tb_lineno
    if kind is types.FrameType:
        return each.f_code, each.f_lineno
    if kind in CODE_ATTRIBUTES:
        return getattr(each, CODE_ATTRIBUTES[kind]), None
    methods = [value for value in tuple(kind.__dict__.values()) if type(value) is types.FunctionType]
    # An instance's place is that of its class: of its first method.
    return (methods[0].__code__, None) if methods else (None, None)


CODE_ATTRIBUTES: dict[type, str] = {
    types.FunctionType: "__code__",
    types.GeneratorType: "gi_code",
    types.CoroutineType: "cr_code",
    types.AsyncGeneratorType: "ag_code",
}


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
        raise ValueError("no file came with the request")
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
    if recording.is_active(torch):
        return "start"
    return "program" if is_history_enabled(torch) else "agent"


def initialised_torch() -> ModuleType:
    """Return PyTorch where it is in use on a GPU. Raises RuntimeError if it is not."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        raise RuntimeError("PyTorch is not loaded in this process")
    if not torch.cuda.is_initialized():  # recording would initialise it
        raise RuntimeError("PyTorch has not used a GPU in this process yet")
    if custom_allocators(torch).exist():
        raise RuntimeError(
            "the program has a memory allocator of its own, beside which PyTorch's may not be read"
        )
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


def reclaim(request: Request) -> dict[str, object]:
    """Run both at the end of a step, awaited for ``seconds``; return each device's bytes before and after.

    Raises RuntimeError if PyTorch is not in use or captures a graph, TimeoutError without a step or
    ``safe_point``.
    """
    seconds = request.number("seconds", 30.0, MAX_SECONDS)
    torch = initialised_torch()
    try:
        result = step_boundary.run(lambda: _empty_cache(torch), seconds)
    except TimeoutError:
        raise TimeoutError(
            f"no training step ended within {seconds:g} s; a program that does not train calls"
            " vramledger_agent.safe_point() where it can pause"
        ) from None
    assert isinstance(result, dict)  # noqa: S101 _empty_cache returned it
    return result


def _empty_cache(torch: ModuleType) -> dict[str, object]:
    # This is the program's own thread, which may call the runtime; our thread may not.
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("the program captures a CUDA graph at this moment; try again")
    started = time.monotonic()
    before = _read_reserved_and_allocated(torch)
    collected = gc.collect()
    torch.cuda.empty_cache()
    after = _read_reserved_and_allocated(torch)
    return {
        "devices": [
            {
                "ordinal": ordinal,
                "reserved_before": before[ordinal][0],
                "reserved_after": after[ordinal][0],
                "allocated_before": before[ordinal][1],
                "allocated_after": after[ordinal][1],
            }
            for ordinal in sorted(before.keys() & after.keys())
            if before[ordinal][0]
        ],
        "collected": collected,
        "paused": time.monotonic() - started,
    }


def _read_reserved_and_allocated(torch: ModuleType) -> dict[int, tuple[int, int]]:
    found = {}
    for ordinal in range(torch.cuda.device_count()):
        try:
            stats = torch._C._cuda_memoryStats(ordinal)
            found[ordinal] = (
                stats["reserved_bytes"]["all"]["current"],
                stats["allocated_bytes"]["all"]["current"],
            )
        except (RuntimeError, KeyError):  # a pluggable allocator counts nothing
            continue
    return found
