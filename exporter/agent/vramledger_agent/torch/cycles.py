"""Find the reference cycles that keep GPU memory, and the lines of code that made them.

It runs the collector once with the flag that keeps what it finds, on the program's own thread and at the end
of a step, and drops what was kept at once. Finalisers and weak references behave as in any collection.
"""

from __future__ import annotations

import gc
import types
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.user_code import FRAMEWORK, code_origin
from vramledger_agent.torch.snapshots import take_without_import
from vramledger_agent.torch.step_peaks import live_blocks

MAX_CYCLES = 10
"""The number of kinds of cycles that are described, the largest ones."""

MAX_OBJECTS = 8
"""The number of objects of a cycle that are described."""

Garbage = list[Any]


def collect_cycles(torch: ModuleType) -> dict[str, Any]:
    """Free the garbage of the cyclic collector, and return what it held of GPU memory."""
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
    """Run the collector, and return what it would have freed."""
    flags, kept = gc.get_debug(), len(gc.garbage)
    try:
        gc.set_debug(flags | gc.DEBUG_SAVEALL)
        gc.collect()
        return gc.garbage[kept:]
    finally:  # also when a signal handler of the program raises
        gc.set_debug(flags)
        del gc.garbage[kept:]


def _describe(torch: ModuleType, garbage: Garbage) -> list[dict[str, object]]:
    """Return the groups with tensors on a GPU, the largest first; groups that the same code made are one."""
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
    """Describe the objects that say where they were made; of many of one kind, one."""
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
"""Where an object of each type has its code."""
