"""Tell what a recording knows of a failed allocation: top lines, categories, last steps, a fitting batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from vramledger_agent.oom.batch_size import PartPeak, Step, fitting_batch, missing_bytes, usable_bytes
from vramledger_agent.oom.stacks import Line, user_lines
from vramledger_agent.oom.verdict import AllocationFailure
from vramledger_agent.torch.recording import Recording, plain_step
from vramledger_agent.torch.step_peaks import ACTIVATIONS, StepMark, StepPeaks, live_blocks

MAX_LINES = 15
"""The number of lines of code that a report has."""

MAX_STEPS = 8
"""The number of last steps that a report has."""

CALLERS = 3

NO_LINE = {
    True: "(C++ code that no Python line called, such as a backward pass)",
    False: "(allocated before the recording, or by C++ code)",
}
"""What replaces the line of a block that has none, in a recording from the start and in another one."""


def top_lines(snapshot: dict[str, Any], device: int, *, from_start: bool) -> list[dict[str, object]]:
    """Return the lines whose blocks have most bytes in use, with their callers."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    known: dict[tuple[int, ...], list[Line]] = {}
    for _, size, block in live_blocks(snapshot, device):
        stack = block.get("frames") or ()
        own = known.get(key := tuple(map(id, stack)))
        if own is None:
            own = known[key] = user_lines(
                [{"file": each["filename"], "line": each["line"], "function": each["name"]} for each in stack]
            )
        first: dict[str, object] = own[0] if own else {"file": NO_LINE[from_start], "line": 0, "function": ""}
        entry = found.setdefault(
            tuple(first.values()), {"bytes": 0, "blocks": 0, **first, "callers": own[1 : 1 + CALLERS]}
        )
        entry["bytes"] += size
        entry["blocks"] += 1
    return sorted(found.values(), key=lambda entry: -entry["bytes"])[:MAX_LINES]


def take_flight(recording: Recording, torch: Any, device: int, failure: AllocationFailure) -> dict[str, Any]:  # noqa: ANN401 not installed where this is checked
    """Return what the report says of a recording, with the ``snapshot``; empty if the program replaced it."""
    taken = recording.take_snapshot(torch)
    snapshot, marks, facts = taken
    if not recording.active:
        return {}  # it is the program's own
    peaks = recording.annotate(taken).get(device, [])
    usable = usable_bytes(failure)
    fits = None
    if facts.batch is not None and usable is not None and missing_bytes(failure):
        fits = fitting_batch(_known_steps(marks, peaks, device), facts.batch, usable)
    return {
        "lines": top_lines(snapshot, device, from_start=recording.from_start),
        "from_start": recording.from_start,
        "steps": [plain_step(step, facts) for step in peaks[-MAX_STEPS:]],
        "types": facts.types.get(device, {}),
        "forward_types": facts.forward_types,
        "batch": facts.batch,
        "fitting_batch": fits,
        "snapshot": snapshot,
    }


def _known_steps(marks: Sequence[StepMark], peaks: list[StepPeaks], device: int) -> list[Step]:
    """Return the finished steps with batch and peak: from the events in the ring, or PyTorch's risen peak."""
    recorded = {step.ended: step for step in peaks if step.whole}
    found = []
    for before, mark in pairwise(marks):  # the first step has no state of the optimizer yet
        step = recorded.get(mark.ended)
        if mark.batch is None:
            continue
        highest = step.highest if step is not None else None
        if step is not None and highest is not None:
            if "backward" not in step.phases:
                continue  # a second optimizer of the same step
            parts = {
                name: PartPeak(peak.bytes, peak.categories[ACTIVATIONS]) for name, peak in step.phases.items()
            }
            found.append(Step(mark.batch, highest.bytes, parts))
        elif mark.peak.get(device, 0) > before.peak.get(device, 0):
            found.append(Step(mark.batch, mark.peak[device], {}))
    return found
