"""Define what NVML's return codes and special numbers mean to us; the numbers are part of its ABI."""

from __future__ import annotations

from typing import Any, Final

Handle = Any
"""A ctypes pointer of pynvml, which has no types."""
Nvml = Any
"""The pynvml module, passed in by driver.py."""
NvmlError = Any
"""The exception of pynvml; its ``value`` is one of the codes below."""
QueryResult = Any
"""The answer to a query; its type depends on the query."""

NONE_32: Final = 2**32 - 1
NONE_64: Final = 2**64 - 1
"""NVML's "not available"; never a number to us."""

MAX_BYTES: Final = 2**50
"""A PiB: a larger figure for a GPU, or for a process on it, is garbage."""

MAX_DEVICES: Final = 1024
"""The maximum number of GPUs of a host, and of instances of a GPU; a larger number is garbage, and to loop so
often would take for ever."""

SUCCESS: Final = 0
UNINITIALIZED: Final = 1
INVALID_ARGUMENT: Final = 2
NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
NOT_FOUND: Final = 6
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
LIB_RM_VERSION_MISMATCH: Final = 18
VGPU_ECC_NOT_SUPPORTED: Final = 22
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26
GPU_NOT_FOUND: Final = 28
UNKNOWN: Final = 999

NO_SUCH_FUNCTION: Final = frozenset({FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
"""The driver does not know this version of a query: it may know an older one."""

UNSUPPORTED: Final = NO_SUCH_FUNCTION | {NOT_SUPPORTED, VGPU_ECC_NOT_SUPPORTED, DEPRECATED}
"""The query has no answer on this device, which is not a failure."""

LOST: Final = frozenset({GPU_IS_LOST, GPU_NOT_FOUND})
"""The GPU has fallen off the bus."""

DRIVER_GONE: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
"""The driver was unloaded, reloaded or upgraded while we used it: no device answers any more."""
