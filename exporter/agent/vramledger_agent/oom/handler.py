"""Write down why PyTorch ran out of memory, before the program sees its own exception.

torch calls the observer on the thread that failed, after its retries and before the stack unwinds. Only at
that moment does the code that took too much still hold its memory. An exception from the observer would
replace the program's OutOfMemoryError, so it raises nothing but what a signal handler of the program raises
meanwhile. It cannot be detached, so there is one observer in the process.

That needs the failure's facts, its verdict, what a recording knows of it (top lines, categories, last steps),
and which batch would fit.
"""

from __future__ import annotations

import _thread
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from vramledger_agent import transport
from vramledger_agent.oom import verdict
from vramledger_agent.oom.report_file import Line, failing_stack, user_lines, write_report
from vramledger_agent.oom.verdict import AllocationFailure
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import make_request
from vramledger_agent.session import collector_entry
from vramledger_agent.torch.allocator import TorchAllocator
from vramledger_agent.torch.live_tensors import type_name
from vramledger_agent.torch.recording import Recording, plain_step, recording
from vramledger_agent.torch.step_peaks import ACTIVATIONS, OPTIMIZER, StepMark, StepPeaks, live_blocks
from vramledger_agent.worker import OOM_REPORT_TIMEOUT_SECONDS, worker

MAX_FILL = 0.98
"""The share of the memory that a suggested batch may take; pieces of the cache remain unused."""


def missing_bytes(failure: AllocationFailure) -> int | None:
    """Return how many bytes the allocation lacked; 0 if there were enough in pieces, None if not known."""
    usable = usable_bytes(failure)
    if usable is None or failure.active is None:
        return None
    return max(0, failure.active + failure.requested - usable)


def usable_bytes(failure: AllocationFailure) -> int | None:
    """Return the most that the process could have in use, given what others hold now."""
    if failure.reserved is None:
        return None
    return failure.reserved + max(0, min(failure.free, failure.capacity - failure.reserved))


SAME_SHARE = 0.01


class PartPeak(NamedTuple):
    """The peak of a part of a step: bytes, and how many of them were activations."""

    bytes: int
    activations: int


class Step(NamedTuple):
    """A step that succeeded."""

    batch: int  # its size
    peak: int  # its highest bytes
    # the peaks of its forward pass, its backward pass and its optimizer; empty where they are not known
    parts: Mapping[str, PartPeak]


def fitting_batch(steps: Sequence[Step], failed: int, usable: int) -> int | None:
    """Return the largest batch that fits by the slope of the last steps; None where they do not show it.

    Each part of a step has a slope of its own: a small batch has its peak in the optimizer, which needs the
    same for any batch, and a large one in the backward pass. Within a part the peak moves too: a small batch
    has that of its backward pass at the end, beside all gradients, and a large one at the beginning. So only
    steps with the same bytes beside the activations are on one line. Where they had several sizes, the slope
    is that of the line of least squares. With one size it is the activations at the peak, for each element of
    the batch; at an optimizer's peak these do not follow the batch.
    """
    fits = []
    if all(step.parts for step in steps):
        for name in {name for step in steps for name in step.parts}:
            peaks = _beside_the_same([(step.batch, step.parts[name]) for step in steps if name in step.parts])
            if name != OPTIMIZER or _has_several_sizes(peaks):
                fits.append(_fits(peaks, usable))
    else:
        peaks = [(step.batch, PartPeak(step.peak, 0)) for step in steps]
        if _has_several_sizes(peaks):
            fits.append(_fits(peaks, usable))
    fitting = min((size for size in fits if size is not None), default=0)
    return fitting if 1 <= fitting < failed else None


Peaks = Sequence[tuple[int, PartPeak]]


def _has_several_sizes(peaks: Peaks) -> bool:
    return len({batch for batch, _ in peaks}) > 1


def _beside_the_same(peaks: Peaks) -> Peaks:
    """Return the peaks that have the same bytes beside the activations as that of the largest batch."""
    _, largest = max(peaks, key=lambda one: (one[0], one[1].bytes))
    others = largest.bytes - largest.activations
    return [
        (batch, peak)
        for batch, peak in peaks
        if math.isclose(peak.bytes - peak.activations, others, rel_tol=SAME_SHARE)
    ]


def _fits(peaks: Peaks, usable: int) -> int | None:
    """Return the largest batch by one part's peaks; 0 if none fits, None if they do not rise with it."""
    base, slope = _line_through(peaks) if _has_several_sizes(peaks) else _line_of_one(peaks)
    if slope > 0 and base < 0:  # they rise faster than the batch
        base, slope = _line_of_one(peaks)
        if slope <= 0:
            return 0
    if slope <= 0:
        return None
    return int((MAX_FILL * usable - base) / slope)


def _line_through(peaks: Peaks) -> tuple[float, float]:
    mean = sum(batch for batch, _ in peaks) / len(peaks)
    mean_peak = sum(peak.bytes for _, peak in peaks) / len(peaks)
    spread = sum((batch - mean) ** 2 for batch, _ in peaks)
    slope = sum((batch - mean) * (peak.bytes - mean_peak) for batch, peak in peaks) / spread
    return mean_peak - slope * mean, slope


def _line_of_one(peaks: Peaks) -> tuple[float, float]:
    batch, peak = max(peaks, key=lambda one: one[1].bytes)
    return float(peak.bytes - peak.activations), peak.activations / batch


MAX_LINES = 15
MAX_STEPS = 8
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


MAX_BLOCKS = 100_000
"""With more live blocks, the report omits the largest free block."""

LIMIT_SHARE = 0.98
"""A capacity below this share of the device is the program's own limit; CUDA's total is a bit below NVML's.
"""


class OomDiagnosis:
    """One failed allocation, diagnosed at the moment of its failure."""

    def __init__(  # noqa: PLR0913, PLR0917 four are PyTorch's own
        self,
        allocator: TorchAllocator,
        ordinal: int,
        requested: int,
        capacity: int,
        free: int,
        stack: dict[str, object] | None = None,
    ) -> None:
        allocator.read_stats({ordinal})
        self._allocator = allocator
        self._ordinal = ordinal
        self._figures = allocator.figures(ordinal)
        self._blocks = allocator.survey_blocks(ordinal, MAX_BLOCKS)
        self._device = request_device(worker.settings.socket_path, free)
        said = self._device.get("total") if self._device is not None else None
        total = said if isinstance(said, int) else None
        self._failure = verdict.AllocationFailure(
            requested=requested,
            capacity=capacity,
            free=free,
            reserved=self._figures["reserved"],
            active=self._figures["active"],
            largest_free=self._blocks.largest_free if self._blocks is not None else None,
            others=bytes_of_others(self._device),
            leaked=allocator.leaked_bytes(ordinal),
            limited=_is_limited(self._figures["reserved"], capacity, free, total),
            device_total=total,
            held=bytes_of_us(self._device),
        )
        self._verdict = verdict.classify(self._failure)
        self._stack = stack

    def summary(self) -> dict[str, object]:
        return {
            "time": time.time(),
            "framework": "torch",
            "ordinal": self._ordinal,
            "requested": self._failure.requested,
            "verdict": self._verdict,
        }

    def flight(self) -> dict[str, Any]:
        """Return what our recording says of the failure; empty where there is none."""
        if not recording.is_active(self._allocator.torch):
            return {}
        try:
            return take_flight(recording, self._allocator.torch, self._ordinal, self._failure)
        except Exception as error:
            if belongs_to_program(error):
                raise
            worker.count_error("torch")  # the rest of the report is still worth having
            return {}

    def report_content(self) -> dict[str, object]:
        allocator, failure, blocks = self._allocator, self._failure, self._blocks
        return {
            "version": 1, "time": time.time(), "pid": os.getpid(), "framework": "torch",
            "framework_version": str(allocator.torch.__version__), "allocator": allocator.backend,
            "ordinal": self._ordinal, "visible": dict(worker.poller.visibility), "verdict": self._verdict,
            "requested": failure.requested, "missing": missing_bytes(failure), "stack": self._stack,
            "autocast": _autocast(allocator.torch, self._stack),
            "gradients_kept": allocator.keeps_gradients(), "capacity": failure.capacity,
            "limited": failure.limited, "free": failure.free, "others": failure.others,
            "leaked": failure.leaked,
            "pool": {name: value for name, value in self._figures.items() if value is not None},
            "largest_free_block": failure.largest_free,
            "expandable_segments": allocator.expandable_enabled
            or (blocks.has_expandable if blocks is not None else None),
            "categories": allocator.categories(self._ordinal, self._figures["allocated"]),
            "collector": collector_entry(),
            "allocated_over_time": allocator.minima(self._ordinal),
            "device": self._device,
        }  # fmt: skip


def _autocast(torch: ModuleType, stack: dict[str, object] | None) -> str | None:
    """Return autocast's type on this thread, or ``off``; it tells something in the forward pass only."""
    if stack is None or stack["phase"] != "forward":
        return None
    try:
        if not torch.is_autocast_enabled("cuda"):
            return "off"
        return type_name(torch.get_autocast_dtype("cuda"))
    except (AttributeError, RuntimeError, TypeError) as error:  # before torch 2.4
        if belongs_to_program(error):
            raise
        return None


def _is_limited(reserved: int | None, capacity: int, free: int, total: int | None) -> bool:
    """Return whether the program has set a limit: below the device's size, or below what is free."""
    if total is not None and capacity < LIMIT_SHARE * total:
        return True
    return reserved is not None and free > capacity - reserved


TIMEOUT_SECONDS = 0.05
"""For the exporter's response: the program waits for it."""

SILENCE_SECONDS = 30.0
"""An exporter that did not answer is not asked for this time: a program may catch many failures."""

_silent_until = 0.0

SIMILAR_FREE_BYTES = 64 * 2**20
"""If the free bytes of two devices differ by less than this, they do not show which device is meant."""


def request_device(socket_path: str, free: int) -> dict[str, object] | None:
    """Return the exporter's entry for the device that failed, None when it is not available.

    We know the device by torch's number and the exporter knows it by its UUID, and we must not call CUDA. But
    the exporter knows our process, so the device is the one that we hold. If we hold several, it is the one
    whose free bytes are what torch was just told.
    """
    global _silent_until  # noqa: PLW0603 a process has one exporter
    if time.monotonic() < _silent_until:
        return None
    response = transport.request(socket_path, make_request("devices"), TIMEOUT_SECONDS)
    if response is None:
        _silent_until = time.monotonic() + SILENCE_SECONDS
    devices = response.get("devices") if response is not None else None
    if not isinstance(devices, list):
        return None
    ours = [device for device in devices if isinstance(device, dict) and _held_by_us(device)]
    if len(ours) == 1:
        return ours[0]
    known = [device for device in ours if isinstance(device.get("free"), int)]
    nearest = sorted(known, key=lambda device: abs(device["free"] - free))
    if not nearest or (len(nearest) > 1 and nearest[1]["free"] - nearest[0]["free"] < SIMILAR_FREE_BYTES):
        return None
    return nearest[0]


def bytes_of_others(device: dict[str, object] | None) -> int | None:
    """Return the bytes that other processes hold on a device, None if the exporter did not say."""
    holders = device.get("holders") if device is not None else None
    if not isinstance(holders, list):
        return None
    if not all(isinstance(each, dict) and isinstance(each.get("bytes"), int) for each in holders):
        return None
    return sum(int(each["bytes"]) for each in holders if each.get("self") is not True)


def bytes_of_us(device: dict[str, object] | None) -> int | None:
    """Return the bytes that this process holds on a device, None if the exporter did not say."""
    ours = [] if device is None else _held_by_us(device)
    return ours[0] if ours and isinstance(ours[0], int) else None


def _held_by_us(device: dict[str, object]) -> list[object]:
    """Return our bytes; only the exporter knows which holder we are, as our pid differs in a container."""
    holders = device.get("holders")
    listed = holders if isinstance(holders, list) else ()
    return [each.get("bytes") for each in listed if isinstance(each, dict) and each.get("self") is True]


MAX_REPORTS = 20
"""The maximum number of reports of one process: a search for the largest size fails often, on purpose."""

REPORT_PAUSE_SECONDS = 5.0
"""The shortest pause between two reports, and between two that are sent to the exporter immediately."""


class OomObserver:
    """The observer that is attached to torch, once in the process."""

    def __init__(self) -> None:
        self.allocator: TorchAllocator | None = None  # whose failures are reported; None while none are
        self.attached = False  # torch has the observer, and calls it
        self._pid = 0
        self._reports = 0
        self._next_report = 0.0
        self._busy = _thread.RLock()

    def attach(self, allocator: TorchAllocator) -> None:
        """Report failures from now on; CUDA must be initialised, because attaching would initialise it."""
        self.allocator = allocator
        self._pid = os.getpid()
        torch = allocator.torch
        register = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
        if register is not None and not self.attached and torch.cuda.is_initialized():
            self.attached = True
            register(self)

    def disable(self) -> None:
        """Stop reporting, although torch goes on calling."""
        self.allocator = None

    def __call__(self, ordinal: int, requested: int, capacity: int, free: int) -> None:
        """Handle a failed allocation; torch passes the device's number and three figures in bytes."""
        try:
            if self.allocator is None or self._pid != os.getpid() or not self.allocator.may_read():
                return
            if self._busy._is_owned():  # type: ignore[attr-defined, unused-ignore]
                return  # a signal handler of the program failed, while this thread's failure is written down
            try:
                # A signal handler may raise directly after this call, so only the lock knows who has it.
                if not self._busy.acquire(blocking=False):
                    return  # another thread's failure is being written down
                # Only strings of the stack are kept: a frame would keep its tensors.
                stack = failing_stack(sys._getframe().f_back)
                self._handle(self.allocator, (ordinal, requested, capacity, free), stack)
            finally:
                try:
                    self._busy.release()
                except RuntimeError as error:  # it is another thread's
                    if belongs_to_program(error):
                        raise
        except BaseException as error:
            if belongs_to_program(error):
                raise
            worker.count_error("torch")

    def _handle(
        self, allocator: TorchAllocator, failed: tuple[int, int, int, int], stack: dict[str, object]
    ) -> None:
        now = time.monotonic()
        diagnosis = OomDiagnosis(allocator, *failed, stack)
        last_oom = diagnosis.summary()
        is_due = now >= self._next_report
        if is_due and self._reports < MAX_REPORTS:
            self._reports += 1
            flight = diagnosis.flight()
            snapshot = flight.pop("snapshot", None)
            content = {**diagnosis.report_content(), **({"flight": flight} if flight else {})}
            path = write_report(content, worker.settings.report_directory, snapshot)
            if path is not None:
                last_oom["report"] = path
        if worker.session is not None:
            worker.session.last_oom = last_oom
        if is_due:
            self._next_report = now + REPORT_PAUSE_SECONDS
            if worker.session is not None:
                # A program that does not catch this may end before the next report.
                worker.session.send_now(OOM_REPORT_TIMEOUT_SECONDS)


observer = OomObserver()
