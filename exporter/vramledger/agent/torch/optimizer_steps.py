"""PyTorch's optimizer steps: the boundary between two of them, and what the optimizer knows bytes to be.

After a step, at most every ten seconds and on the stepping thread, the optimizer's parameters, their
gradients and its state are added up by device: no GPU call, 0.14 ms for 150 parameters of AdamW, 0.95 ms for
1,000, and less often the longer it takes. What no optimizer knows (activations, buffers, frozen parameters)
is the rest of what is allocated.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Iterator
from types import ModuleType

from vramledger.agent import step_boundary
from vramledger.agent.worker import worker

EVERY = 10.0
"""Seconds between two countings of one optimizer at least."""

SHARE = 5_000
"""Counting costs at most one part in so many of the time between two."""

Counted = dict[int, list[int]]
"""By device: bytes of parameters, of gradients, of optimizer state."""


class Steps:
    """What the optimizers of this process hold, as of their last steps."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.handle: object | None = None
        self.next: weakref.WeakKeyDictionary[object, float] = weakref.WeakKeyDictionary()
        self.counted: weakref.WeakKeyDictionary[object, Counted] = weakref.WeakKeyDictionary()
        compiler = getattr(torch, "compiler", None)
        self.compiling = getattr(compiler, "is_compiling", None)

    def watch(self) -> None:
        """Be called after every optimizer step, where this torch has a hook for that."""
        if self.handle is not None:
            return
        optimizers = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is None:
            return
        compiling = self.compiling

        def stepped(optimizer: object, args: object, kwargs: object) -> None:
            del args, kwargs
            if compiling is not None and compiling():
                return  # a compiled step has nothing of us in it
            self.stepped(optimizer)

        self.handle = register(stepped)

    def unwatch(self) -> None:
        """Be called no more."""
        if self.handle is not None:
            self.handle.remove()  # type: ignore[attr-defined]
            self.handle = None

    def stepped(self, optimizer: object) -> None:
        """Serve who waits for the step's end, and count what the optimizer knows if it is time."""
        try:
            step_boundary.run_pending()
            worker.nudge()
            now = time.monotonic()
            if now < self.next.get(optimizer, 0.0):
                return
            self.next[optimizer] = now + EVERY
            begun = time.thread_time()
            self.counted[optimizer] = count(optimizer)
            self.next[optimizer] = now + max(EVERY, (time.thread_time() - begun) * SHARE)
        except Exception:
            worker.errors["torch"] = worker.errors.get("torch", 0) + 1
            self.unwatch()

    def categories(self, ordinal: int, allocated: int | None) -> dict[str, int] | None:
        """Return what a device's allocated bytes are, None without an optimizer step on it.

        The four always sum to what is allocated. An optimizer that is counted as more than that has since
        lost what it held: then nothing is known until its next step.
        """
        total = [0, 0, 0]
        known = False
        for counted in tuple(self.counted.values()):
            if ordinal in counted:
                known = True
                total = [so_far + more for so_far, more in zip(total, counted[ordinal], strict=True)]
        if not known or allocated is None or sum(total) > allocated:
            return None
        parameters, gradients, optimizer = total
        return {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": allocated - sum(total),
        }


def count(optimizer: object) -> Counted:
    """Return the bytes that an optimizer knows, by device."""
    found: Counted = {}
    state = getattr(optimizer, "state", {})
    for group in getattr(optimizer, "param_groups", ()):
        for parameter in group["params"]:
            _add(found, parameter, 0)
            gradient = parameter.grad
            if gradient is not None:
                _add(found, gradient, 1)
            for tensor in _tensors(state.get(parameter)):
                _add(found, tensor, 2)
    return found


def _tensors(state: object) -> Iterator[object]:
    """Yield what may be tensors in one parameter's state; Adam has plain ones, others keep lists of them."""
    values = state.values() if isinstance(state, dict) else ()
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


def _add(found: Counted, tensor: object, place: int) -> None:
    """Add a tensor's bytes where it is; of a distributed one this process holds its local part."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    device = getattr(tensor, "device", None)
    if getattr(device, "type", None) != "cuda":
        return
    ordinal = getattr(device, "index", None)
    size = getattr(tensor, "nbytes", None)
    if isinstance(ordinal, int) and isinstance(size, int):
        found.setdefault(ordinal, [0, 0, 0])[place] += size
