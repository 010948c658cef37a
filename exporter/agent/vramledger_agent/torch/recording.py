"""Keep a recording of PyTorch's memory history, and the training steps that it saw.

A recording is a ring: PyTorch drops the oldest events, but keeps the stack of every block in use. So in a
recording from the start of the program even an old block has its line of code. It costs about two
microseconds an allocation, so there is one only by consent. A program may begin a recording of its own, which
replaces ours without a sign. With PyTorch's defaults that one has C++ frames, and ours has none. PyTorch
takes seconds to name these frames (5 s for 17 with 2.13).

Read PyTorch's allocator without harm: beside no allocator of the program's own, and without an import.

Such an allocator serves a ``torch.cuda.MemPool``; vLLM's sleep mode has one. The caching allocator calls it
with its lock held, and Python code then waits for the GIL. A function that reads the allocator's counters
holds the GIL and waits for that lock: a deadlock (seen on an H200 with torch 2.11, within 8 s).

To name the lines of a recorded stack, PyTorch asks itself for ``torch._inductor``. Where nothing has imported
that yet, the question does, and takes seconds. If that happens on a thread of ours while the program imports
a part of PyTorch, Python lets one of the two have a module that is not complete: on an H200 with torch 2.11
six of six programs failed so as they made their first optimizer. PyTorch accepts that there is no such part,
and names every line but those of code that ``torch._inductor`` has written, of which there is none yet.
"""

from __future__ import annotations

import gc
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

from vramledger_agent.import_hook import RefusedImport
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import SNAPSHOT_KEY
from vramledger_agent.protocol.user_code import is_native
from vramledger_agent.torch.live_tensors import TensorFacts, read_tensors, young_batch
from vramledger_agent.torch.step_peaks import StepMark, StepPeaks, step_peaks
from vramledger_agent.worker import worker


class _Witness:
    """Whoever lists all objects, as ``gc.get_objects()`` does, refers to this type, too."""


class CustomAllocators:
    """Whether the program has made an allocator of its own.

    Each one is an object of a type of PyTorch's, and each object refers to its type. So the type's reference
    count tells whether there is one, which takes a microsecond. A list of all objects counts for nothing.
    """

    def __init__(self, torch: ModuleType) -> None:
        """Look for allocators that exist already, which takes time only if CUDA is in use."""
        names = ("_CUDAPluggableAllocator", "_cuda_CUDAAllocator")  # torch 2.11 makes objects of the first
        self._types = [getattr(torch._C, name) for name in names if hasattr(torch._C, name)]
        self._references = self._count()
        cuda = getattr(torch, "cuda", None)
        self._found = cuda is not None and bool(cuda.is_initialized()) and _has_wrapped_allocator(cuda)

    def exist(self) -> bool:
        """Tell whether there is one, or was one: a pool may use it for as long as the program runs."""
        if not self._found:
            references = self._count()
            self._found = references > self._references
            self._references = min(self._references, references)  # the import itself holds some for a moment
        return self._found

    def _count(self) -> int:
        # In one step, so that no other thread runs between two of them.
        *counts, lists = tuple(map(sys.getrefcount, (*self._types, _Witness)))
        return sum(counts) - lists * len(counts)


@cache
def custom_allocators(torch: ModuleType) -> CustomAllocators:
    """Return the one of this process; the first call belongs right behind the import of PyTorch."""
    return CustomAllocators(torch)


def _has_wrapped_allocator(cuda: ModuleType) -> bool:
    wrapper = getattr(cuda.memory, "_CUDAAllocator", None)
    return wrapper is not None and any(issubclass(type(each), wrapper) for each in gc.get_objects())


_Snapshot = TypeVar("_Snapshot")


class WouldImportError(RuntimeError):
    """The snapshot was not taken, because PyTorch would import a part of itself."""


def take_without_import(
    torch: ModuleType, take: Callable[[], _Snapshot], *, own_thread: bool = False
) -> _Snapshot:
    """Return what ``take`` gives. Raises WouldImportError if it would import, unless on ``own_thread``."""
    with RefusedImport("torch._inductor") as holds:
        if not holds and not own_thread and _would_import(torch):
            raise WouldImportError(
                "to name the lines, PyTorch would import torch._inductor beside the program, which can break"
                " an import of the program; it does not once the program has imported torch._inductor"
            )
        return take()


def _would_import(torch: ModuleType) -> bool:
    return "_inductor" in vars(torch).get("_lazy_modules", ()) and "_inductor" not in vars(torch)


DEFAULT_EVENTS = 10_000
"""The events that a recording keeps unless told otherwise; a snapshot with them takes 0.05 s."""

MAX_MARKS = 64
_OPTIONAL_ARGUMENTS: tuple[dict[str, Any], ...] = ({"skip_actions": ["free_requested"]}, {})
"""Only newer PyTorch accepts ``skip_actions``; a completed free says what its request said."""


_Found = TypeVar("_Found")


class TakenSnapshot(NamedTuple):
    """A snapshot, the ends of the steps before it, and what was known of the tensors when it was taken."""

    snapshot: dict[str, Any]
    marks: tuple[StepMark, ...]
    facts: TensorFacts


class Recording:
    """The recording of this process, of which there is at most one that is ours."""

    def __init__(self) -> None:
        self.from_start = False  # it began before the program's first allocation
        self.marks: deque[StepMark] = deque(maxlen=MAX_MARKS)  # the ends of the newest steps, since it began
        # returns the devices whose counters may be read now
        self.used_devices: Callable[[], Iterable[int]] = tuple
        self.active = False
        self._at_boundary = False
        self._events = 0
        self._begun: int | None = None

    def is_active(self, torch: ModuleType) -> bool:
        """Return whether our recording goes on; the program may have stopped it."""
        if self.active and not is_history_enabled(torch):
            self.active = self.from_start = False
        return self.active

    def begin(
        self, torch: ModuleType, events: int, *, from_start: bool = False, boundary: bool = False
    ) -> None:
        """Begin to record, unless somebody does already.

        ``from_start``: there was no allocation yet. ``boundary``: the program is between two steps. Raises
        RuntimeError if this PyTorch cannot record.
        """
        if is_history_enabled(torch):
            return
        self.marks.clear()
        self._begun = None
        self._events = events
        self._at_boundary = boundary
        start_history(torch, events)
        self.from_start = from_start
        self.active = True

    def end(self, torch: ModuleType, snapshot: Mapping[str, Any] | None = None) -> None:
        """Stop our recording, not one of the program that replaced it, as ``snapshot`` or a new one tells."""
        if self.is_active(torch):
            with suppress(WouldImportError):
                self.compare(
                    take_without_import(torch, torch.cuda.memory._snapshot) if snapshot is None else snapshot
                )
        if self.active:
            self.active = self.from_start = False
            torch.cuda.memory._record_memory_history(enabled=None)

    def compare(self, snapshot: Mapping[str, Any]) -> None:
        """Note if a snapshot shows that the program's recording has replaced ours."""
        traces = snapshot.get("device_traces") or ()
        if self.active and (_has_native_frames(snapshot) or any(len(each) > self._events for each in traces)):
            self.active = self.from_start = self._at_boundary = False

    def note_optimizer(self) -> None:
        self._begun = time.time_ns() // 1000

    def note_step(self, torch: ModuleType) -> None:
        """Remember that an optimizer's step, and with it a training step, ends now."""
        begun, self._begun = self._begun, None
        peak, allocated = {}, {}
        for ordinal in self.used_devices():
            counter = torch._C._cuda_memoryStats(ordinal)["allocated_bytes"]["all"]
            peak[ordinal], allocated[ordinal] = counter["peak"], counter["current"]
        ended = time.time_ns() // 1000
        batch = _read_or(None, young_batch, torch)
        self.marks.append(StepMark(begun, ended, batch, peak, allocated))

    def take_snapshot(self, torch: ModuleType, *, tensors: bool = True) -> TakenSnapshot:
        """Return a snapshot and steps; ``tensors`` on the program's thread only. Raises WouldImportError."""
        marks = tuple(self.marks)  # first: a step that ends meanwhile has events after the snapshot
        snapshot: dict[str, Any] = take_without_import(torch, torch.cuda.memory._snapshot, own_thread=tensors)
        self.compare(snapshot)
        facts = _read_or(TensorFacts(), read_tensors, torch) if tensors else TensorFacts()
        return TakenSnapshot(snapshot, marks, facts)

    def has_all(self, trace: list[Any]) -> bool:
        """Return whether a device's trace has all events since the recording began."""
        return len(trace) < self._events

    def peaks(self, taken: TakenSnapshot, device: int) -> list[StepPeaks]:
        traces = taken.snapshot.get("device_traces") or []
        complete = device < len(traces) and self.has_all(traces[device])
        return step_peaks(
            taken.snapshot,
            device,
            taken.marks,
            taken.facts.addresses.get(device, {}),
            whole=complete and (self._at_boundary or self.from_start),
        )

    def annotate(self, taken: TakenSnapshot, **more: object) -> dict[int, list[StepPeaks]]:
        """Add to a snapshot, as plain data, what PyTorch does not know; return the peaks by device."""
        snapshot, _, facts = taken
        numbers = sorted({segment.get("device", 0) for segment in snapshot["segments"]})
        peaks = {number: self.peaks(taken, number) for number in numbers}
        devices = {
            number: {
                "steps": [plain_step(step, facts) for step in steps],
                "types": facts.types.get(number, {}),
            }
            for number, steps in peaks.items()
        }
        snapshot[SNAPSHOT_KEY] = {
            "version": 1,
            "from_start": self.from_start,
            "devices": devices,
            "forward_types": facts.forward_types,
            **more,
        }
        return peaks


def _read_or(unknown: _Found, read: Callable[[ModuleType], _Found], torch: ModuleType) -> _Found:
    """Return what a function reads of the program's tensors; if it fails, count the error: nothing is known.

    The objects belong to the program, so any of them may raise an error.
    """
    try:
        return read(torch)
    except BaseException as error:
        if belongs_to_program(error):
            raise
        worker.count_error("torch")
        return unknown


def plain_step(step: StepPeaks, facts: TensorFacts) -> dict[str, object]:
    """Return a step as plain data; without tensors read, old parameters would seem activations."""
    return {
        "whole": step.whole,
        "finished": step.ended is not None,
        "batch": step.batch,
        "phases": {
            name: {"bytes": peak.bytes, "categories": peak.categories if facts.known else {}}
            for name, peak in step.phases.items()
        },
        "gradients_before_backward": step.gradients_before_backward if facts.known else None,
    }


def _has_native_frames(snapshot: Mapping[str, Any]) -> bool:
    """Return whether a stack has C++ frames: each of its ends is one, where they are recorded at all."""
    blocks = chain.from_iterable(segment["blocks"] for segment in snapshot["segments"])
    events = chain.from_iterable(snapshot.get("device_traces") or ())
    for holder in chain(blocks, events):
        frames = holder.get("frames")
        if frames and any(
            file and is_native(file) for file in (frames[0]["filename"], frames[-1]["filename"])
        ):
            return True
    return False


def is_history_enabled(torch: ModuleType) -> bool:
    """Return whether PyTorch records, for us or for the program. Raises RuntimeError if it does not say."""
    try:
        return bool(torch._C._cuda_isHistoryEnabled())
    except AttributeError:
        raise RuntimeError(
            f"PyTorch {torch.__version__} does not say whether it already records; 2.2 or newer does"
        ) from None


def start_history(torch: ModuleType, events: int) -> None:
    """Have PyTorch record. Raises RuntimeError if this PyTorch records in a way that we do not know."""
    for optional in _OPTIONAL_ARGUMENTS:
        arguments: dict[str, Any] = {
            "context": "alloc",
            "stacks": "python",  # C++ frames make a snapshot a hundred times slower, and say little
            "max_entries": events,
            **optional,
        }
        try:
            torch.cuda.memory._record_memory_history("all", **arguments)
        except TypeError as error:  # an older version has no such argument
            if belongs_to_program(error):
                raise
            continue
        return
    raise RuntimeError(f"PyTorch {torch.__version__} records in a way that this agent does not know")


recording = Recording()
