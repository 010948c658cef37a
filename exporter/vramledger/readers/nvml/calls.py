"""Make one query to NVML, and decide what its return codes and special numbers mean to us."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, Final

from vramledger.errors import DriverError
from vramledger.logs import FailureStreaks

Handle = Any
Nvml = Any
"""The pynvml module, passed in by driver.py."""
NvmlError = Any
QueryResult = Any
Failures = dict[str, str]
"""The queries that failed for another reason than "not supported", each with the driver's words."""

NONE_32: Final = 2**32 - 1
NONE_64: Final = 2**64 - 1
"""NVML's "not available"; never a number to us."""

MAX_BYTES: Final = 2**50
"""A PiB: a larger figure for a GPU, or for a process on it, is garbage."""

MAX_DEVICES: Final = 1024
"""The maximum number of GPUs of a host and instances of a GPU; a larger number is garbage."""

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
RESET_REQUIRED: Final = 16
LIB_RM_VERSION_MISMATCH: Final = 18
VGPU_ECC_NOT_SUPPORTED: Final = 22
ARGUMENT_VERSION_MISMATCH: Final = 25
DEPRECATED: Final = 26
GPU_NOT_FOUND: Final = 28
UNKNOWN: Final = 999

REFUSED: Final = "reset-required"
"""The key of :data:`Failures` for a query that the driver refused until the GPU is reset."""

NO_SUCH_FUNCTION: Final = frozenset({FUNCTION_NOT_FOUND, ARGUMENT_VERSION_MISMATCH})
"""The driver does not know this version of a query: it may know an older one."""

UNSUPPORTED: Final = NO_SUCH_FUNCTION | {NOT_SUPPORTED, VGPU_ECC_NOT_SUPPORTED, DEPRECATED}
"""The query has no answer on this device, which is not a failure."""

LOST: Final = frozenset({GPU_IS_LOST, GPU_NOT_FOUND})
GARBAGE: Final = "an answer that cannot be"
"""The words where the driver answered, and not with what it can have meant."""

IMPOSSIBLE_ROW, IMPOSSIBLE_MEMORY = "process_memory", "memory_figures"
"""The queries of which one value alone cannot be: a holder's bytes, or the GPU's. The rest of it counts."""

DRIVER_GONE: Final = frozenset({UNINITIALIZED, DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH})
"""The driver was unloaded, reloaded or upgraded while we used it: no device answers any more."""


_UUID: Final = re.compile(r"(GPU|MIG)-[\w/.-]{1,90}", re.ASCII)


_FAILING: Final = FailureStreaks("A query of a GPU failed")
"""Each GPU has a thread, so a query of a thread is one of a GPU."""


class DeviceLostError(Exception):
    """The GPU has fallen off the bus: further queries to it are pointless."""


def raise_if_gone(error: NvmlError) -> None:
    """Raise for a lost driver or GPU; return for any other. Raises DriverError or DeviceLostError."""
    if error.value in DRIVER_GONE:
        reason = "driver-lost"
        raise DriverError(
            reason, f"the NVIDIA driver has gone away ({error}); if it does not return, see dmesg"
        ) from error
    if error.value in LOST:
        raise DeviceLostError from error


def query(
    nvml: Nvml, function: Callable[[Handle], QueryResult], handle: Handle, name: str, failed: Failures
) -> QueryResult:
    """Return the answer or None; unless unsupported, add to ``failed``. Raises as :func:`raise_if_gone`."""
    try:
        answer = function(handle)
        if _FAILING:
            _FAILING.succeeded(name, threading.get_ident())
        return answer  # noqa: TRY300 what the streak does cannot raise
    except nvml.NVMLError as error:
        raise_if_gone(error)
        if error.value == RESET_REQUIRED:
            failed[REFUSED] = str(error)
        if error.value not in UNSUPPORTED:
            failed[name] = str(error)
    except (nvml.NVMLLibraryMismatchError, UnicodeDecodeError):
        pass  # a function of another version; a name that is not text (nvitop has seen one)
    except ValueError:
        failed[name] = GARBAGE
    except (DriverError, DeviceLostError):
        raise
    except Exception as error:  # noqa: BLE001 a bug costs what was asked for, and nothing else
        failed[name] = repr(error)
        _FAILING.failed(name, error, threading.get_ident())
    return None


def call_function(nvml: Nvml, name: str, *arguments: object) -> object:
    """Call a function of pynvml; one that pynvml lacks counts as the driver's. Raises NVMLError."""
    function = getattr(nvml, name, None)
    if function is None:
        raise nvml.NVMLError(FUNCTION_NOT_FOUND)
    answer: object = function(*arguments)
    return answer


def read_uuid(nvml: Nvml, handle: Handle) -> str:
    """Return the identity of a GPU or an instance. Raises NVMLError if it is missing or garbage."""
    try:
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError:
        uuid = ""
    if not _UUID.fullmatch(uuid):
        raise nvml.NVMLError(UNKNOWN)
    return uuid
