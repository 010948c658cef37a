"""Make one query to NVML, and decide what happens when the driver has no answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from vramledger.errors import DriverError
from vramledger.readers.nvml.return_codes import (
    DRIVER_GONE,
    FUNCTION_NOT_FOUND,
    LOST,
    UNKNOWN,
    UNSUPPORTED,
    Handle,
    Nvml,
    NvmlError,
    QueryResult,
)

_UUID: Final = re.compile(r"(GPU|MIG)-[\w/.-]{1,90}", re.ASCII)


class DeviceLostError(Exception):
    """The GPU has fallen off the bus: further queries to it are pointless."""


def raise_if_gone(error: NvmlError) -> None:
    """Raise for an NVMLError of the whole driver or the whole GPU; return for any other.

    Raises:
        DriverError: the driver is gone for all devices.
        DeviceLostError: this GPU is gone.
    """
    if error.value in DRIVER_GONE:
        reason = "driver-lost"
        message = f"the NVIDIA driver has gone away ({error}); if it does not return, see dmesg"
        raise DriverError(reason, message) from error
    if error.value in LOST:
        raise DeviceLostError from error


def query(
    nvml: Nvml, function: Callable[[Handle], QueryResult], handle: Handle, name: str, failed: list[str]
) -> QueryResult:
    """Return the answer or None; add ``name`` to ``failed`` if it failed and is not just unsupported.

    Raises:
        DriverError: the driver is gone for all devices.
        DeviceLostError: this GPU is gone.
    """
    try:
        return function(handle)
    except nvml.NVMLError as error:
        raise_if_gone(error)
        if error.value not in UNSUPPORTED:
            failed.append(name)
    except (nvml.NVMLLibraryMismatchError, UnicodeDecodeError):
        pass  # a function of another version; a name that is not text (nvitop has seen one)
    except ValueError:
        failed.append(name)  # garbage
    return None


def call_function(nvml: Nvml, name: str, *arguments: object) -> object:
    """Call a function of pynvml; one that pynvml itself lacks counts as one that the driver lacks.

    Raises:
        NVMLError: as the function does.
    """
    function = getattr(nvml, name, None)
    if function is None:
        raise nvml.NVMLError(FUNCTION_NOT_FOUND)
    answer: object = function(*arguments)
    return answer


def read_uuid(nvml: Nvml, handle: Handle) -> str:
    """Return the identity of a GPU or an instance.

    Raises:
        NVMLError: the identity is missing, or it is garbage, which must not become another GPU's ledger.
    """
    try:
        uuid = str(nvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError:
        uuid = ""
    if not _UUID.fullmatch(uuid):
        raise nvml.NVMLError(UNKNOWN)
    return uuid
