"""A torch that holds no GPU, and behaves as 2.4 to 2.15 do where the agent looks at it.

Every call that touches CUDA in the real one is written to ``torch.calls``, and which thread made it.
"""

from __future__ import annotations

import os
import sys
import threading

calls: list[tuple[str, bool]] = []
"""Calls that would be calls of the CUDA runtime, and whether the main thread made them."""


def called(name: str) -> None:
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


class dtype:  # noqa: N801 as in the real one
    def __init__(self, name: str, itemsize: int) -> None:
        self._name = name
        self.itemsize = itemsize

    def __str__(self) -> str:
        return f"torch.{self._name}"


float32, bfloat16 = dtype("float32", 4), dtype("bfloat16", 2)


class Metadata:
    """The form of one output of a forward operation."""

    def __init__(self, kind: dtype, shape: tuple[int, ...]) -> None:
        self.dtype = kind
        self.shape = shape


class Node:
    """One operation of a graph, with those that gave its input; each has its own class."""

    def __new__(cls, name: str, *_: object) -> Node:  # noqa: PYI034 no typing_extensions here
        """Make the operation's class."""
        return object.__new__(type(name.rpartition(":")[2], (cls,), {}))

    def __init__(self, _name: str, kind: dtype, shape: tuple[int, ...], *before: Node) -> None:
        self._input_metadata = [Metadata(kind, shape)]
        self.next_functions = tuple((node, 0) for node in before)


class Tensor:
    """This number of bytes on a device."""

    held = False  # also of one whose making was interrupted

    def __init__(self, size: int, ordinal: int = 0, *, kind: str = "cuda", dtype: dtype = float32) -> None:
        self.device = Device(kind, ordinal if kind == "cuda" else None)
        self.nbytes = size
        self.dtype = dtype
        self.grad: Tensor | None = None
        self.node: Node | None = None
        self._version = 0
        if kind == "cuda":
            cuda._lazy_init()
            _C.allocators[ordinal].allocate(size)
            self.held = True
            self._address = cuda.memory._allocated(ordinal, size, sys._getframe(1))

    view = False
    stale = False
    _address = 0  # a signal's handler may raise before there is one

    @property
    def grad_fn(self) -> Node | None:
        """Return the operation that made this; a view whose base has changed has none that is valid."""
        if self.stale:
            raise RuntimeError("Output 0 of Split is a view and its base has been modified inplace")
        return self.node

    @grad_fn.setter
    def grad_fn(self, node: Node | None) -> None:
        self.node = node

    def _is_view(self) -> bool:
        return self.view

    def data_ptr(self) -> int:
        return self._address

    def __del__(self) -> None:
        if self.held:
            self.held = False  # it may be called by name, too
            _C.allocators[self.device.index or 0].release(self.nbytes)
            if self._address:
                cuda.memory._released(self._address)


def backward(parameters: list[Tensor]) -> None:
    """Make or add to the gradients, on a thread that has no frames of Python."""
    cuda.memory.frameless = True
    try:
        for parameter in parameters:
            made = Tensor(parameter.nbytes, parameter.device.index or 0, dtype=parameter.dtype)
            if parameter.grad is None:
                parameter.grad = made
            else:
                parameter.grad._version += 1
            del made
    finally:
        cuda.memory.frameless = False


autocast: dtype | None = None
"""The type of numbers that autocast uses; None without it."""


def is_autocast_enabled(kind: str) -> bool:
    return kind == "cuda" and autocast is not None


def get_autocast_dtype(kind: str) -> dtype | None:
    del kind
    return autocast


__all__ = ["Tensor", "cuda", "optim"]
