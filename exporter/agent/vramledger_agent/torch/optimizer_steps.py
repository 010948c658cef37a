"""Find the boundary between two optimizer steps, and the bytes that the optimizer knows.

After a step, at most every ten seconds and on the stepping thread, we add up the optimizer's parameters,
their gradients and its state by device. It takes 0.14 ms for 150 parameters of AdamW, 0.95 ms for 1,000, and
is done less often the longer it takes. The rest of what is allocated is what no optimizer knows: activations,
buffers, frozen parameters.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType

from vramledger_agent import step_boundary
from vramledger_agent.program_errors import belongs_to_program
from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.torch.live_tensors import optimizer_tensors
from vramledger_agent.torch.recording import recording
from vramledger_agent.worker import worker

MIN_PAUSE_SECONDS = 10.0
MIN_PAUSE_TO_COST = 5_000
FIRST_STEPS = 64
"""Steps after which the allocator is read as well (10 us each): a fast leak fills the device in seconds."""

PROBED_STEPS = 3
"""The steps after which it is known whether gradients are kept."""

BytesByDevice = dict[int, list[int]]
"""By device: bytes of parameters, of gradients, of optimizer state."""


class _Count:
    """The last count of one optimizer, by the optimizer's ``id``: an optimizer need not be hashable."""

    __slots__ = ("bytes", "due", "optimizer")

    def __init__(self, optimizer: object, due: float) -> None:
        # a weak reference without a callback: Python throws away what a callback raises, and with it the
        # exceptions of signal handlers
        self.optimizer = weakref.ref(optimizer)
        self.due = due  # when to count again
        self.bytes: BytesByDevice | None = None  # what was counted; None if counting failed


class _GradientProbe:
    """The look at one gradient over some steps: is it the same tensor each time?

    A gradient that ``zero_grad()`` has freed is a new tensor in the next step, with a version of its own. A
    gradient that is kept is added to, which raises its version. A view has the version of the whole tensor, a
    bucket of distributed training for example, so it says nothing.
    """

    __slots__ = ("optimizer", "versions")

    def __init__(self, optimizer: object) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.versions: list[int] = []

    def record_version(self, optimizer: object) -> bool:
        """Look at the gradient after a step; return whether that was the last look."""
        gradient = _first_gradient(optimizer)
        version = getattr(gradient, "_version", None)
        if not isinstance(version, int) or gradient._is_view():  # type: ignore[attr-defined]
            self.versions.clear()
            return True
        self.versions.append(version)
        return len(self.versions) == PROBED_STEPS

    def kept(self) -> bool | None:
        """Return whether the gradient is kept; None where the looks do not show it."""
        if len(self.versions) < PROBED_STEPS:
            return None
        return all(before < after for before, after in pairwise(self.versions))


def _first_gradient(optimizer: object) -> object | None:
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            if parameter.grad is not None:
                return parameter.grad  # type: ignore[no-any-return]
    return None


class OptimizerSteps:
    """What the optimizers of this process hold, as of their last steps."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._pid = os.getpid()
        self._hook_handles: list[object] = []
        self.counts: dict[int, _Count] = {}  # by the optimizer's ``id``
        # called after each of the program's first steps; None without an allocator that counts
        self.note_step: Callable[[], None] | None = None
        # gradients live from step to step; None while that is not known
        self.keeps_gradients: bool | None = None
        self._probe: _GradientProbe | None = None
        self.uncounted = False  # the program has an optimizer that cannot be counted, so the sums say nothing
        self._first_steps = FIRST_STEPS
        compiler = getattr(torch, "compiler", None)
        self._is_compiling = getattr(compiler, "is_compiling", None)
        # Returns -1 outside of a backward pass. An optimizer whose step runs in a hook of the backward pass
        # (one for each parameter) makes a step there, which is not a boundary.
        self._backward_pass = getattr(torch._C, "_current_graph_task_id", None)

    @property
    def counted(self) -> dict[int, BytesByDevice | None]:
        """Return the last counts of the optimizers that still exist, by ``id``; None where one failed."""
        return {
            key: count.bytes for key, count in tuple(self.counts.items()) if count.optimizer() is not None
        }

    def register(self) -> None:
        """Have every optimizer step call us at its end, where this torch has a hook for that."""
        if self._hook_handles:
            return
        self._pid = os.getpid()
        optimizers = sys.modules.get("torch.optim.optimizer")
        register_hook = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register_hook is None:
            return
        is_compiling = self._is_compiling

        def after_step(optimizer: object, args: object, kwargs: object) -> None:
            del args, kwargs
            if is_compiling is not None and is_compiling():
                return  # a compiled step does not contain our code
            self.after_step(optimizer)

        self._hook_handles.append(register_hook(after_step))
        register_hook = getattr(optimizers, "register_optimizer_step_pre_hook", None)
        if register_hook is not None and may_record():

            def before_step(optimizer: object, args: object, kwargs: object) -> None:
                del optimizer, args, kwargs
                if is_compiling is not None and is_compiling():
                    return  # first, and alone: what follows here would be compiled
                if recording.active and self._pid == os.getpid() and not self._is_in_backward_pass():
                    recording.note_optimizer()

            self._hook_handles.append(register_hook(before_step))

    def unregister(self) -> None:
        while self._hook_handles:
            self._hook_handles.pop().remove()  # type: ignore[attr-defined]

    def after_step(self, optimizer: object) -> None:
        """Run what waits for the step's end, and count what the optimizer knows if it is due.

        Nothing is caught unless something is due: what a signal handler raises here goes on into the program.
        """
        count = self.counts.get(id(optimizer))
        is_due = count is None or time.monotonic() >= count.due or count.optimizer() is not optimizer
        if not (
            is_due
            or self._first_steps
            or self._probe is not None
            or recording.active
            or step_boundary.is_awaited()
            or worker.suspended
        ):
            return
        if self._pid != os.getpid() or self._is_in_backward_pass():
            return  # a forked child cannot use the device: the allocator's lock may be held there for ever
        for work in (self._record_step, self._note_first_step, worker.resume, step_boundary.run_pending):
            _run_guarded(work)
        if is_due and worker.pid == os.getpid():
            _run_guarded(lambda: self._count_and_probe(optimizer))
        _run_guarded(lambda: self._look_at_gradient(optimizer))

    def _record_step(self) -> None:
        if recording.active:
            recording.note_step(self._torch)

    def _note_first_step(self) -> None:
        if self._first_steps:
            self._first_steps -= 1
            if self.note_step is not None:
                self.note_step()

    def _count_and_probe(self, optimizer: object) -> None:
        self._count(optimizer)
        self._probe = self._probe or _GradientProbe(optimizer)

    def _look_at_gradient(self, optimizer: object) -> None:
        probe = self._probe
        if probe is None:
            return
        probed = probe.optimizer()
        if probed is None:  # it exists no longer
            self._probe = None
        elif probed is optimizer and probe.record_version(optimizer):
            self.keeps_gradients = probe.kept()
            self._probe = None

    def _is_in_backward_pass(self) -> bool:
        return self._backward_pass is not None and self._backward_pass() != -1

    def _count(self, optimizer: object) -> None:
        """Count one optimizer; one that cannot be counted does not keep the others from it."""
        now = time.monotonic()
        key = id(optimizer)
        try:
            count = _Count(optimizer, now + MIN_PAUSE_SECONDS)
        except TypeError as error:  # it has no weak references, so we could not know when it has gone
            if belongs_to_program(error):
                raise
            self.uncounted = True
            return
        self.counts[key] = count
        begun = time.thread_time()
        count.bytes = count_bytes(optimizer)
        cost = time.thread_time() - begun
        count.due = now + max(MIN_PAUSE_SECONDS, cost * MIN_PAUSE_TO_COST)
        for other, each in tuple(self.counts.items()):
            if each.optimizer() is None:
                self.counts.pop(other, None)

    def categories(self, ordinal: int, allocated: int | None) -> dict[str, int] | None:
        """Return what a device's allocated bytes are for; None before the first optimizer step on it.

        The four always sum to what is allocated. If an optimizer's count is more than that, the optimizer has
        since lost what it held: then nothing is known until its next step. Nor is anything known if one of
        the optimizers could not be counted.
        """
        total = [0, 0, 0]
        found = False
        for counted in self.counted.values():
            if counted is None:
                return None
            if ordinal in counted:
                found = True
                total = [so_far + more for so_far, more in zip(total, counted[ordinal], strict=True)]
        if not found or self.uncounted or allocated is None or sum(total) > allocated:
            return None
        parameters, gradients, optimizer = total
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": allocated - sum(total),
        }


def _run_guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except BaseException as error:
        if belongs_to_program(error):
            raise
        worker.count_error("torch")


def may_record() -> bool:
    """Return whether the program consents to a recording, so that its steps have to be timed."""
    return worker.settings.records_from_start or "snapshot" in worker.settings.consents


def count_bytes(optimizer: object) -> BytesByDevice:
    found: BytesByDevice = {}
    for category, tensor in optimizer_tensors(optimizer):
        _add_bytes(found, tensor, CATEGORIES.index(category))
    return found


def _add_bytes(found: BytesByDevice, tensor: object, kind: int) -> None:
    """Add a tensor's bytes to its device; for a distributed tensor, add only the part in this process."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    device = getattr(tensor, "device", None)
    if getattr(device, "type", None) != "cuda":
        return
    ordinal = getattr(device, "index", None)
    size = getattr(tensor, "nbytes", None)
    if isinstance(ordinal, int) and isinstance(size, int):
        found.setdefault(ordinal, [0, 0, 0])[kind] += size
