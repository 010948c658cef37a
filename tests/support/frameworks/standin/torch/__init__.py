"""A torch that holds no GPU, and behaves as the real one does where the agent looks at it.

What it does was read in the sources of torch 2.4 to 2.15 and measured with 2.11 on an H200: which calls raise
before CUDA is initialised, which would initialise it, what the counters are called. Every call that touches
CUDA in the real one is written to ``torch.calls``, and which thread made it.
"""

from __future__ import annotations

import os
import sys
import threading

calls: list[tuple[str, bool]] = []
"""Calls that would be calls of the CUDA runtime, and whether the main thread made them."""


def called(name: str) -> None:
    """Record a call of the CUDA runtime."""
    calls.append((name, threading.current_thread() is threading.main_thread()))


__version__ = os.environ.get("FAKE_TORCH_VERSION", "2.13.0+fake")

from torch import _C, cuda, optim  # noqa: E402 as in the real one, in the middle


class compiler:  # noqa: N801 a module in the real one
    @staticmethod
    def is_compiling() -> bool:
        return False


class Device:
    def __init__(self, kind: str, index: int | None) -> None:
        self.type = kind
        self.index = index


class Tensor:
    """This number of bytes on a device."""

    held = False  # also of one whose making was interrupted

    def __init__(self, size: int, ordinal: int = 0, *, kind: str = "cuda") -> None:
        self.device = Device(kind, ordinal if kind == "cuda" else None)
        self.nbytes = size
        self.grad: Tensor | None = None
        if kind == "cuda":
            cuda._lazy_init()
            _C.allocators[ordinal].allocate(size)
            self.held = True
            self._address = cuda.memory._allocated(ordinal, size, sys._getframe(1))

    def __del__(self) -> None:
        if self.held:
            self.held = False  # it may be called by name, too
            _C.allocators[self.device.index or 0].release(self.nbytes)
            cuda.memory._released(self._address)


__all__ = ["Tensor", "cuda", "optim"]
