"""Notice when PyTorch's allocator may call an allocator of the program's own, written in Python.

Such an allocator serves a ``torch.cuda.MemPool``; vLLM's sleep mode has one. The caching allocator calls it
with its lock held, and Python code then waits for the GIL. A function that reads the allocator's counters
holds the GIL and waits for that lock: a deadlock (seen on an H200 with torch 2.11, within 8 s). So nothing of
the allocator may be read in a program that has one.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from types import ModuleType


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
    """Search all objects for one of the class in which PyTorch wraps such allocators."""
    wrapper = getattr(cuda.memory, "_CUDAAllocator", None)
    return wrapper is not None and any(issubclass(type(each), wrapper) for each in gc.get_objects())
