"""When PyTorch runs out of memory: say why, in a file, before the program's own exception goes its way.

torch calls the observer on the thread that failed, after its retries and before the stack unwinds: the only
moment at which the culprit still holds its memory. Whatever the observer raised would replace the program's
OutOfMemoryError, so it raises nothing. It cannot be detached, so there is one for the process.
"""

from __future__ import annotations

import _thread
import os
import time

from vramledger.agent import transport
from vramledger.agent.oom import report_file as report
from vramledger.agent.oom import verdict
from vramledger.agent.torch import block_survey as heap
from vramledger.agent.torch import counters, leak_detector
from vramledger.agent.worker import OOM_WAIT, worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Protocol

    from vramledger.agent.torch.optimizer_steps import Steps

    class TorchState(Protocol):
        """What the observer asks of PyTorch's provider."""

        torch: ModuleType
        cuda: Any
        backend: str | None
        expandable: bool | None
        current: dict[int, dict[str, object]]
        heap: heap.Heap
        growth: dict[int, leak_detector.LeakDetector]
        steps: Steps

        def look(self, devices: set[int]) -> None:
            """Read the counters of some devices."""


ASK_WAIT = 0.05
"""Seconds for the exporter to say what others hold."""

REPORTS = 20
"""Reports that one process writes: a program that tries sizes until one fits fails often, and on purpose."""

PAUSE = 5.0
"""Seconds between two of them, and between two that the exporter is told of at once."""

BLOCKS = 100_000
"""With more live blocks the report does without the largest free one."""


class Observer:
    """What is attached to torch, once for the process.

    Attributes:
        failures: how often it was called; torch's own ``num_ooms`` is what the exporter counts.
    """

    def __init__(self) -> None:
        self.pytorch: TorchState | None = None
        self.attached = False
        self.failures = 0
        self.written = 0
        self.next = 0.0
        self.pid = 0
        self.busy = _thread.allocate_lock()

    def __call__(self, device: int, requested: int, capacity: int, free: int) -> None:
        """Hear that an allocation failed; four whole numbers from torch, bytes but for the device."""
        try:
            if self.pytorch is None or self.pid != os.getpid():
                return
            if not self.busy.acquire(blocking=False):
                return  # another thread's failure is being written down
            try:
                self.failures += 1
                self.report(self.pytorch, device, requested, capacity, free)
            finally:
                self.busy.release()
        except KeyboardInterrupt:
            _thread.interrupt_main()  # it was meant for the program, which gets it as soon as we are out
        except BaseException:
            worker.errors["torch"] = worker.errors.get("torch", 0) + 1

    def report(self, pytorch: TorchState, device: int, requested: int, capacity: int, free: int) -> None:
        """Judge the failure, write it down if there is not one of a moment ago, and let the exporter know."""
        now = time.monotonic()
        account = FailureAccount(pytorch, device, requested, capacity, free)
        path = None
        first = now >= self.next
        if first and self.written < REPORTS:
            self.written += 1
            path = report.write(account.facts(), worker.settings.report_directory)
        worker.last_oom = {
            "time": time.time(),
            "framework": "torch",
            "ordinal": device,
            "requested": requested,
            "verdict": account.verdict,
        }
        if path is not None:
            worker.last_oom["report"] = path
        if first:
            self.next = now + PAUSE
            worker.tell(OOM_WAIT)  # a program that does not catch this may be gone before the next report


class FailureAccount:
    """All that can be said about one failure."""

    def __init__(self, pytorch: TorchState, device: int, requested: int, capacity: int, free: int) -> None:
        self.pytorch = pytorch
        self.device = device
        pytorch.look({device})
        stats = pytorch.current[device]
        self.figures = counters.figures(stats)
        self.seen: heap.Seen | None = None
        if heap.blocks([stats]) <= BLOCKS:
            self.seen = pytorch.heap.take().get(device)
        self.leaked = pytorch.growth.get(device, leak_detector.LeakDetector()).leaked()
        self.exporter = device_entry(free)
        total = self.exporter.get("total") if self.exporter is not None else None
        self.failure = verdict.Failure(
            requested=requested,
            capacity=capacity,
            free=free,
            reserved=self.figures["reserved"],
            active=self.figures["active"],
            largest_free=self.seen.largest_free if self.seen is not None else None,
            others=others(self.exporter),
            leaked=self.leaked,
            limited=isinstance(total, int) and capacity < LIMITED * total,
        )
        self.verdict = verdict.judge(self.failure)

    def facts(self) -> dict[str, object]:
        """Return the report file's content."""
        failure, seen = self.failure, self.seen
        return {
            "version": 1,
            "time": time.time(),
            "pid": os.getpid(),
            "framework": "torch",
            "framework_version": str(self.pytorch.torch.__version__),
            "allocator": self.pytorch.backend,
            "ordinal": self.device,
            "visible": dict(worker.visible),
            "verdict": self.verdict,
            "requested": failure.requested,
            "capacity": failure.capacity,
            "limited": failure.limited,
            "free": failure.free,
            "others": failure.others,
            "leaked": failure.leaked,
            "pool": {name: value for name, value in self.figures.items() if value is not None},
            "largest_free_block": failure.largest_free,
            "expandable_segments": self.pytorch.expandable or (seen.expandable if seen is not None else None),
            "categories": self.pytorch.steps.categories(self.device, self.figures["allocated"]),
            "collector": worker.gc_monitor.report_entry(),
            "allocated_over_time": list(
                self.pytorch.growth.get(self.device, leak_detector.LeakDetector()).values
            ),
            "device": self.exporter,
        }


LIMITED = 0.98
"""Less of the device than this is a limit that the program set; CUDA's total is a little below NVML's."""


def device_entry(free: int) -> dict[str, object] | None:
    """Return what the exporter says of the device that failed, None when that is not to be had.

    We know the device by torch's number, the exporter by its UUID, and asking CUDA is out of the question.
    But the exporter knows our process, so the device is the one that we hold; among several, the one whose
    free bytes are what torch was just told.
    """
    answer = transport.request(worker.settings.socket_path, {"version": 1, "ask": "devices"}, ASK_WAIT)
    devices = answer.get("devices") if answer is not None else None
    if not isinstance(devices, list):
        return None
    ours = [device for device in devices if isinstance(device, dict) and _is_held(device)]
    if len(ours) == 1:
        return ours[0]
    known = [device for device in ours if isinstance(device.get("free"), int)]
    near = sorted(known, key=lambda device: abs(device["free"] - free))
    if not near or (len(near) > 1 and _close(near[0], near[1])):
        return None
    return near[0]


def _is_held(device: dict[str, object]) -> bool:
    holders = device.get("holders")
    return isinstance(holders, list) and any(isinstance(each, dict) and _is_us(each) for each in holders)


def _close(one: dict[str, object], other: dict[str, object]) -> bool:
    return abs(int(one["free"]) - int(other["free"])) < 64 * 2**20  # type: ignore[call-overload, no-any-return]


def _is_us(holder: dict[str, object]) -> bool:
    """Say whether a holder is this process; the exporter knows, for in a container its pids are not ours."""
    return holder.get("self") is True


def others(device: dict[str, object] | None) -> int | None:
    """Return the bytes that other processes hold on a device, None when the exporter did not say."""
    holders = device.get("holders") if device is not None else None
    if not isinstance(holders, list):
        return None
    total = 0
    for holder in holders:
        if not isinstance(holder, dict) or not isinstance(holder.get("bytes"), int):
            return None
        if not _is_us(holder):
            total += holder["bytes"]
    return total


_observer = Observer()


def attach(pytorch: TorchState) -> None:
    """Be told of failures from now on; CUDA must be initialised, for attaching would initialise it."""
    _observer.pytorch = pytorch
    _observer.pid = os.getpid()
    register = getattr(pytorch.torch._C, "_cuda_attach_out_of_memory_observer", None)
    if register is not None and not _observer.attached and pytorch.cuda.is_initialized():
        _observer.attached = True
        register(_observer)


def silence() -> None:
    """Be told, and say nothing."""
    _observer.pytorch = None
