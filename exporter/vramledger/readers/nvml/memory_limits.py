"""Read what cgroups may take of a GPU's memory: from the kernel's ``dmem``, otherwise from the driver.

The driver (from 615 on, MPS v3) keeps these limits in the ``dmem`` controller of the kernel. Where the kernel
has none, it has a backend of its own, which NVML shows. From documentation, not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from vramledger.model.reading import CgroupLimit
from vramledger.readers.hosts.dmem import DeviceMemoryCgroups
from vramledger.readers.nvml.calls import call_function, raise_if_gone
from vramledger.readers.nvml.return_codes import MAX_BYTES, NONE_64, UNSUPPORTED, Handle, Nvml

MOST_CGROUPS: Final = 512
"""The maximum number of cgroups that are read for a GPU; 64 holders in pods have about 100."""


class Limits(NamedTuple):
    """The limits of cgroups on a GPU, None when not known; and our own, None without one."""

    limits: tuple[CgroupLimit, ...] | None = None
    partition: int | None = None


class LimitReader:
    """Read the limits of the cgroups that hold memory, and our own."""

    def __init__(self, nvml: Nvml, cgroups: DeviceMemoryCgroups) -> None:
        self._nvml = nvml
        self._cgroups = cgroups
        self._unsupported = False

    def read(self, gpu: Handle, pci_bus_id: str | None, paths: Iterable[str], failed: list[str]) -> Limits:
        """Return the limits of these cgroups on a GPU; ``failed`` gets ``limits`` if the query fails.

        Raises:
            DriverError: the driver is gone for all devices.
            DeviceLostError: this GPU is gone.
        """
        own = self._cgroups.own_chain()
        wanted = tuple(dict.fromkeys((*own, *paths)))
        if len(wanted) > MOST_CGROUPS:
            failed.append("limits")
            wanted = wanted[:MOST_CGROUPS]
        region = self._cgroups.region(pci_bus_id)
        if region is not None:
            limits = self._cgroups.read(region, wanted)
            if limits is None:
                failed.append("limits")
        else:
            limits = self._ask_driver(gpu, wanted, failed)
        if limits is None:
            return Limits()
        ours = [each.maximum for each in limits if each.cgroup in own and each.maximum is not None]
        return Limits(limits, min(ours, default=None))

    def _ask_driver(
        self, gpu: Handle, paths: Iterable[str], failed: list[str]
    ) -> tuple[CgroupLimit, ...] | None:
        if self._unsupported or not hasattr(self._nvml, "c_nvmlGetMemoryLimits_v1_t"):
            return None
        limits = []
        for path in paths:
            request = self._nvml.c_nvmlGetMemoryLimits_v1_t()
            request.nameSpace = f"{self._cgroups.mount}{path}".encode(errors="replace")
            try:
                call_function(self._nvml, "nvmlDeviceGetMemoryLimits_v1", gpu, request)
            except self._nvml.NVMLError as error:
                raise_if_gone(error)
                self._unsupported = error.value in UNSUPPORTED
                if not self._unsupported:
                    failed.append("limits")
                return None
            soft, hard, used = request.softLimit, request.hardLimit, request.currentUsed
            # The driver may write "all" as the largest number, and a guarantee of all is not a figure here.
            minimum = None if soft == NONE_64 else soft
            if max(minimum or 0, used) > MAX_BYTES:
                failed.append("limits")  # garbage
                return None
            maximum = hard if hard <= MAX_BYTES else None
            if minimum or used or maximum is not None:
                limits.append(CgroupLimit(path, minimum, maximum, used))
        return tuple(limits)
