"""Initialisation: late, once, and never in the child of a process that has done it."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable

import torch
from torch import _C
from torch.cuda import memory

_initialized = False
_initializer = os.getpid()
_queued_calls: list[tuple[Callable[[], None], list[str]]] = []
_initialization_lock = threading.RLock()
_tls = threading.local()
default_generators: tuple[object, ...] = ()


class DeferredCudaCallError(Exception):
    """A queued call failed."""


def _in_bad_fork() -> bool:
    return _initialized and _initializer != os.getpid()


def is_initialized() -> bool:
    """Say whether CUDA is initialised, and usable here."""
    return _initialized and not _in_bad_fork()


def _lazy_call(function: Callable[[], None]) -> None:
    with _initialization_lock:
        if is_initialized():
            function()
        else:
            _queued_calls.append((function, traceback.format_stack()))


def _lazy_init() -> None:
    global _initialized, _initializer, default_generators  # noqa: PLW0603
    if is_initialized() or hasattr(_tls, "is_initializing"):
        return
    with _initialization_lock:
        if _in_bad_fork():
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        _C._cuda_init()
        default_generators = tuple(object() for _ in _C.allocators)
        _tls.is_initializing = True
        try:
            for function, where in _queued_calls:
                try:
                    function()
                except Exception as error:
                    raise DeferredCudaCallError("".join(where)) from error
        finally:
            del _tls.is_initializing
        _initializer = os.getpid()
        _initialized = True


def init() -> None:
    _lazy_init()


def _runtime(name: str) -> Callable[..., int]:
    def call(*_: object) -> int:
        torch.called(name)
        _lazy_init()
        return 0

    return call


is_available = _runtime("cudaGetDeviceCount")
current_device = _runtime("cudaGetDevice")
mem_get_info = _runtime("cudaMemGetInfo")
synchronize = _runtime("cudaDeviceSynchronize")
get_device_properties = _runtime("cudaGetDeviceProperties")
reset_peak_memory_stats = _runtime("reset_peak_memory_stats")


def device_count() -> int:
    torch.called("cudaGetDeviceCount")
    return len(_C.allocators)


def is_current_stream_capturing() -> bool:
    return False


def empty_cache() -> None:
    """Free the whole segments without live blocks."""
    torch.called("cudaFree")
    for allocator in _C.allocators:
        kept = -(-allocator.allocated // _C.SEGMENT) * _C.SEGMENT
        allocator.free += allocator.reserved - kept
        allocator.reserved = kept


__all__ = ["init", "is_initialized", "memory"]
