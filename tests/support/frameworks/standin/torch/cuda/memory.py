"""The part whose signature shows what this version can do."""

from __future__ import annotations

import itertools
import sys
import time
from types import FrameType

from torch import _C

recording: dict[str, object] | None = None
"""The kind of history that is recorded, None for none."""

frameless = False
"""What is allocated now has no frames of Python."""

_events: list[dict[str, object]] = []
_live: dict[int, tuple[int, int, list[dict[str, object]]]] = {}
_addresses = itertools.count(0x7F0000000000, 2**30)


def _record_memory_history(  # noqa: PLR0913, PLR0917 torch's own
    enabled: str | None = "all",
    context: str | None = "all",
    stacks: str = "all",
    max_entries: int = sys.maxsize,
    device: object = None,
    clear_history: bool = False,
    compile_context: bool = False,
    global_record_annotations: bool = False,
    skip_actions: list[str] | None = None,
) -> None:
    global recording  # noqa: PLW0603
    del device, clear_history, compile_context, global_record_annotations
    _C._cuda_init()  # without what Python has queued for it
    _events.clear()
    recording = None
    if enabled is not None:
        recording = {"context": context, "stacks": stacks, "most": max_entries, "skip": skip_actions}


def _allocated(ordinal: int, size: int, caller: FrameType | None) -> int:
    frames: list[dict[str, object]] = []
    while recording is not None and caller is not None and not frameless:
        code = caller.f_code
        frames.append({"filename": code.co_filename, "line": caller.f_lineno, "name": code.co_name})
        caller = caller.f_back
    if recording is not None and recording["stacks"] == "all":
        inner = {"filename": "??", "line": 0, "name": "torch::unwind::unwind()"}
        outer = {"filename": "./csu/../csu/libc-start.c", "line": 360, "name": "__libc_start_main_impl"}
        frames = [inner, *frames, outer]
    address = next(_addresses)
    _live[address] = ordinal, size, frames
    _note("alloc", address)
    return address


def _released(address: int) -> None:
    _note("free_completed", address)
    del _live[address]


def _note(action: str, address: int) -> None:
    if recording is not None:
        ordinal, size, frames = _live[address]
        event = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
        _events.append({**event, "time_us": time.time_ns() // 1000, "device": ordinal})
        del _events[: -int(str(recording["most"]))]


def _snapshot(device: object = None) -> dict[str, object]:
    """Return segments and, with a history, events."""
    del device
    segments = []
    for ordinal, allocator in enumerate(_C.allocators):
        blocks = [
            {"address": address, "size": size, "state": "active_allocated", "frames": frames}
            for address, (at, size, frames) in sorted(_live.items())
            if at == ordinal
        ]
        free = {"size": allocator.reserved - allocator.allocated, "state": "inactive", "frames": []}
        segments.append({"device": ordinal, "total_size": allocator.reserved, "blocks": [*blocks, free]})
    traces = [[event for event in _events if event["device"] == each] for each in range(len(_C.allocators))]
    return {"segments": segments, "device_traces": traces}


def memory_snapshot(mempool_id: object = None, include_traces: bool = True) -> object:
    del mempool_id
    return _C._cuda_memorySnapshot((0, 0, include_traces))["segments"]
