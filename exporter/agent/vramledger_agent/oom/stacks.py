"""Read the stack of a failed allocation, as text: no frame is kept, because a frame keeps its tensors."""

from __future__ import annotations

import sys

from vramledger_agent.protocol.user_code import BACKWARD_CALL, FRAMEWORK, code_origin, phase_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, TracebackType

MAX_FRAMES = 60
"""The innermost frames that a report has."""

Line = dict[str, object]
"""A frame as a report has it: ``file``, ``line`` and ``function``."""


def failing_stack(frame: FrameType | None) -> dict[str, object]:
    """Return where an allocation failed; for a thread of the backward pass, the stack of who waits for it."""
    lines = frame_lines(frame)
    phase = phase_of([(str(line["file"]), str(line["function"])) for line in lines])
    if not any(code_origin(str(line["file"])) != FRAMEWORK for line in lines):
        waiting = [found for found in map(frame_lines, sys._current_frames().values()) if _waits(found)]
        lines = [*lines, *waiting[0]] if len(waiting) == 1 else lines
    return {"phase": phase, "frames": lines[:MAX_FRAMES]}


def _waits(lines: list[Line]) -> bool:
    return any(line["function"] == BACKWARD_CALL for line in lines)


def frame_lines(frame: FrameType | None) -> list[Line]:
    found: list[Line] = []
    while frame is not None:
        found.append(_line(frame, frame.f_lineno))
        frame = frame.f_back
    return found


def traceback_lines(entry: TracebackType | None) -> list[Line]:
    """Return the frames of an exception, innermost first."""
    found: list[Line] = []
    while entry is not None:
        found.append(_line(entry.tb_frame, entry.tb_lineno))
        entry = entry.tb_next
    return found[::-1]


def _line(frame: FrameType, number: int | None) -> Line:
    return {"file": frame.f_code.co_filename, "line": number or 0, "function": frame.f_code.co_name}


def user_lines(lines: list[Line]) -> list[Line]:
    """Return the program's own lines; if it has none, those of the libraries; if none, the framework's."""
    origins = [code_origin(str(line["file"])) for line in lines]
    nearest = min(origins, default=FRAMEWORK)
    return [line for line, origin in zip(lines, origins, strict=True) if origin == nearest]
