"""Read PyTorch's allocator without harm: beside no allocator of the program's own, and without an import.

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
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import TypeVar

from vramledger_agent.import_hook import RefusedImport


class CustomAllocators:
    """Whether the program has made an allocator of its own.

    Each one is an object of a type of PyTorch's, and each object refers to its type. So the type's reference
    count tells whether there is one, which takes a microsecond.
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
        return sum(map(sys.getrefcount, self._types))


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
            message = (
                "to name the lines, PyTorch would import torch._inductor beside the program, which can break"
                " an import of the program; it does not once the program has imported torch._inductor"
            )
            raise WouldImportError(message)
        return take()


def _would_import(torch: ModuleType) -> bool:
    return "_inductor" in vars(torch).get("_lazy_modules", ()) and "_inductor" not in vars(torch)
