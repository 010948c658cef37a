"""Find out whether MIG divides a GPU, and into which instances."""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Failures, Handle, Nvml, query


class MigInstance(NamedTuple):
    """A MIG instance: its handle, and the fields of DeviceReading of the same names."""

    handle: Handle
    uuid: str
    name: str | None
    mig_profile: str | None
    gpu_instance: int | None
    compute_instance: int | None
    mig_placement: str | None


def read_instances(nvml: Nvml, gpu: Handle, failed: Failures) -> list[MigInstance] | None:
    """Return the instances of a GPU, None when MIG does not divide it.

    If ``mig`` is in ``failed``, neither answer counts. Raises DriverError if the driver is gone for all
    devices, DeviceLostError if this GPU is gone.
    """
    mode = query(nvml, partial(_read_mode, nvml), gpu, "mig", failed)
    if mode is None or mode[0] != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    count = query(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, gpu, "mig", failed) or 0
    if count > calls.MAX_DEVICES:
        failed["mig"] = calls.GARBAGE
        count = 0
    found = [_read_instance(nvml, gpu, position, failed) for position in range(count)]
    return [each for each in found if each is not None]


def _read_mode(nvml: Nvml, handle: Handle) -> list[int]:
    """Return whether MIG is on, and whether it will be after the next reset."""
    mode: list[int] = nvml.nvmlDeviceGetMigMode(handle)
    if mode[0] not in {nvml.NVML_DEVICE_MIG_ENABLE, nvml.NVML_DEVICE_MIG_DISABLE}:
        raise nvml.NVMLError(calls.UNKNOWN)
    return mode


def _read_instance(nvml: Nvml, gpu: Handle, position: int, failed: Failures) -> MigInstance | None:
    """Return the instance at a position, None if the position is empty: positions have gaps."""
    try:
        handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, position)
    except nvml.NVMLError as error:
        calls.raise_if_gone(error)
        if error.value not in {calls.NOT_FOUND, calls.INVALID_ARGUMENT}:
            failed["mig"] = calls.GARBAGE
        return None
    uuid = query(nvml, partial(calls.read_uuid, nvml), handle, "mig", failed)
    if uuid is None:
        return None
    name = query(nvml, nvml.nvmlDeviceGetName, handle, "mig", failed)
    gpu_instance = query(nvml, nvml.nvmlDeviceGetGpuInstanceId, handle, "mig", failed)
    return MigInstance(
        handle,
        uuid,
        name,
        _read_profile(nvml, handle, name, failed),
        gpu_instance,
        query(nvml, nvml.nvmlDeviceGetComputeInstanceId, handle, "mig", failed),
        None if gpu_instance is None else _read_placement(nvml, gpu, gpu_instance),
    )


def _read_placement(nvml: Nvml, gpu: Handle, gpu_instance: int) -> str | None:
    """Return the place of a GPU instance; None where the driver does not tell, as it tells only root."""

    def read(_: Handle) -> str:
        handle = nvml.nvmlDeviceGetGpuInstanceById(gpu, gpu_instance)
        place = nvml.nvmlGpuInstanceGetInfo(handle).placement
        if max(place.start, place.size) > calls.MAX_DEVICES:
            raise nvml.NVMLError(calls.UNKNOWN)
        return f"{place.start}:{place.size}"

    placement: str | None = query(nvml, read, gpu, "", {})
    return placement


def _read_profile(nvml: Nvml, handle: Handle, name: str | None, failed: Failures) -> str | None:
    """Return ``1g.18gb`` from the name (``NVIDIA H200 MIG 1g.18gb``), otherwise from the attributes."""
    found = re.search(r"\bMIG (\S+)$", name or "")
    if found:
        return found[1]
    attributes = query(nvml, nvml.nvmlDeviceGetAttributes, handle, "mig", failed)
    if attributes is None:
        return None
    size = f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
    compute = attributes.computeInstanceSliceCount
    return size if compute == attributes.gpuInstanceSliceCount else f"{compute}c.{size}"
