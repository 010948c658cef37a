"""Read a device's memory, and find out whose it is: the device's own, or the operating system's.

Two kinds of machines are known from documentation alone. On GH200, GB200 and GB300 in NUMA mode the operating
system manages the device's memory as a NUMA node without CPUs. NVIDIA says of ``nvmlDeviceGetMemoryInfo``
there: its accuracy depends on the accounting of the operating system, and pages are typically not released
when a process ends. GB10 (DGX Spark) and Jetson have no memory of their own: NVML answers NOT_SUPPORTED, on
some drivers a total of 0, and the GPU uses the host's memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from vramledger.model.reading import COHERENT, UNIFIED, CgroupLimit, MemoryReading, NodeMemory
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, HostMemory, SystemMemory
from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Failures, Handle, Nvml, query

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

    def read(self, gpu: Handle, pci_bus_id: str | None, paths: Iterable[str], failed: Failures) -> Limits:
        """Return a GPU's limits of these cgroups. Raises DriverError or DeviceLostError if it is gone."""
        own = self._cgroups.own_chain()
        wanted = tuple(dict.fromkeys((*own, *paths)))
        if len(wanted) > MOST_CGROUPS:
            failed["limits"] = calls.GARBAGE
            wanted = wanted[:MOST_CGROUPS]
        region = self._cgroups.region(pci_bus_id)
        if region is not None:
            limits = self._cgroups.read(region, wanted)
            if limits is None:
                failed["limits"] = calls.GARBAGE
        else:
            limits = self._ask_driver(gpu, wanted, failed)
        if limits is None:
            return Limits()
        ours = [each.maximum for each in limits if each.cgroup in own and each.maximum is not None]
        return Limits(limits, min(ours, default=None))

    def _ask_driver(
        self, gpu: Handle, paths: Iterable[str], failed: Failures
    ) -> tuple[CgroupLimit, ...] | None:
        if self._unsupported or not hasattr(self._nvml, "c_nvmlGetMemoryLimits_v1_t"):
            return None
        limits = []
        for path in paths:
            request = self._nvml.c_nvmlGetMemoryLimits_v1_t()
            request.nameSpace = f"{self._cgroups.mount}{path}".encode(errors="replace")
            try:
                calls.call_function(self._nvml, "nvmlDeviceGetMemoryLimits_v1", gpu, request)
            except self._nvml.NVMLError as error:
                calls.raise_if_gone(error)
                self._unsupported = error.value in calls.UNSUPPORTED
                if not self._unsupported:
                    failed["limits"] = calls.GARBAGE
                return None
            soft, hard, used = request.softLimit, request.hardLimit, request.currentUsed
            # The driver may write "all" as the largest number, and a guarantee of all is not a figure here.
            minimum = None if soft == calls.NONE_64 else soft
            if max(minimum or 0, used) > calls.MAX_BYTES:
                failed["limits"] = calls.GARBAGE
                return None
            maximum = hard if hard <= calls.MAX_BYTES else None
            if minimum or used or maximum is not None:
                limits.append(CgroupLimit(path, minimum, maximum, used))
        return tuple(limits)


_INTEGRATED: Final = "(nvgpu)"
"""The end of a Tegra GPU's name with the nvgpu driver ("Orin (nvgpu)"); Thor has the ordinary one."""

_COHERENT_PRODUCT: Final = re.compile(r"\bG[HB][23]00\b")
"""The products whose memory may be a NUMA node, for drivers that do not tell."""

_ADDRESSING: Final = {0: "none", 1: "hmm", 2: "ats"}
"""NVML's addressing modes: by no page tables of the host, by the driver's copy of them, or by themselves."""

_LAST_NODE: Final = 2**16


_VIRTUALIZATION: Final = ("none", "passthrough", "vgpu", "host_vgpu", "host_vsga")
"""NVML's virtualization modes: this host's, a machine's, a part of one there, the host of parts."""


def read_virtualization(nvml: Nvml, gpu: Handle) -> str | None:
    """Return how a GPU is shared with virtual machines, or None. Raises NVMLError if the query failed."""
    mode = calls.call_function(nvml, "nvmlDeviceGetVirtualizationMode", gpu)
    return _VIRTUALIZATION[mode] if isinstance(mode, int) and 0 <= mode < len(_VIRTUALIZATION) else None


def read_confidential(nvml: Nvml, _: Handle) -> str:
    """Return whether confidential computing is on in this virtual machine: ``off``, ``on`` or ``devtools``.

    NVIDIA documents that the performance counters are off in the mode ``on``, and that ``devtools`` has no
    such protection. Raises NVMLError if the query failed, or is not supported, or the answer is garbage.
    """
    state: Any = calls.call_function(nvml, "nvmlSystemGetConfComputeState")
    if state.ccFeature not in (0, 1) or state.devToolsMode not in (0, 1):
        raise nvml.NVMLError(calls.UNKNOWN)
    if not state.ccFeature:
        return "off"
    return "devtools" if state.devToolsMode else "on"


def is_integrated(name: str | None) -> bool:
    """Tell of the driver that knows only a name: its zeros and processes prove nothing."""
    return name is not None and name.endswith(_INTEGRATED)


class DeviceMemory(NamedTuple):
    """A device's memory, in the order of DeviceReading's fields."""

    memory: MemoryReading | None
    memory_kind: str | None = None
    node: NodeMemory | None = None
    addressing_mode: str | None = None


def _of_host(host: HostMemory) -> MemoryReading:
    return MemoryReading(host.total, host.available, host.total - host.available, None)


class NamedDevice(NamedTuple):
    """A GPU or an instance of one: its handle, its UUID and its product name."""

    handle: Handle
    uuid: str
    name: str | None


class _Placement(NamedTuple):
    """Where a device's memory is: whether it is a NUMA node, and of which number, if that is known."""

    coherent: bool
    node: int | None = None
    addressing_mode: str | None = None


class MemoryReader:
    """Read the memory of a GPU and of its instances."""

    def __init__(self, nvml: Nvml, system: SystemMemory) -> None:
        self._nvml = nvml
        self._system = system
        self._version_2 = True
        self._worked = False
        self._unified = False
        self._placements: dict[str, _Placement] = {}
        self._due: set[str] = set()
        self._has_bar1: bool | None = None

    def look_again(self) -> None:
        """Find out again at the next reading where the memory is: it rarely changes."""
        self._due = set(self._placements)
        self._has_bar1 = None

    def read(self, device: NamedDevice, gpu: NamedDevice, failed: Failures) -> DeviceMemory:
        """Return a device's memory, without figures if unknown; ``failed`` gets each failed query."""
        handle = device.handle
        if is_integrated(gpu.name):
            host = self._system.host()
            if host is None:
                failed["memory"] = calls.GARBAGE
                return DeviceMemory(None)
            return DeviceMemory(_of_host(host), UNIFIED)
        placement = self._placement(device, gpu, failed)
        errors: Failures = {}
        memory = query(self._nvml, self._query, handle, "memory", errors)
        if errors.get("memory") == calls.GARBAGE:  # the GPU answers, and only its figures cannot be
            errors = {calls.IMPOSSIBLE_MEMORY: calls.GARBAGE}
        failed |= errors
        host = self._system.host() if not errors and self._may_be_unified(gpu, failed) else None
        if self._unified and self._system.host() is None:
            failed["memory"] = calls.GARBAGE
            return DeviceMemory(None, addressing_mode=placement.addressing_mode)
        if host is not None and (memory is None or memory.total in (0, host.total)):
            self._unified = True
            return DeviceMemory(_of_host(host), UNIFIED, addressing_mode=placement.addressing_mode)
        if memory is not None and memory.total == 0:
            memory = None
            failed["memory"] = calls.GARBAGE
        if not placement.coherent or memory is None:
            return DeviceMemory(memory, addressing_mode=placement.addressing_mode)
        node = None if placement.node is None else self._system.node(placement.node)
        if node is None and placement.node is not None:
            failed["node"] = calls.GARBAGE
        return DeviceMemory(memory, COHERENT, node, placement.addressing_mode)

    def _query(self, handle: Handle) -> MemoryReading | None:
        reserved = None
        try:
            version = self._nvml.nvmlMemory_v2 if self._version_2 else None
            memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            if self._version_2 and memory.reserved != calls.NONE_64:
                reserved = memory.reserved
        except self._nvml.NVMLError as error:
            if self._worked and error.value in calls.UNSUPPORTED:  # this query had an answer before
                raise self._nvml.NVMLError(calls.UNKNOWN) from error
            if not self._version_2 or error.value not in calls.NO_SUCH_FUNCTION:
                raise
            self._version_2 = False  # a driver before 510
            return self._query(handle)
        reading = MemoryReading(memory.total, memory.free, memory.used, reserved)
        if calls.NONE_64 in reading and not self._worked:
            return None
        if reading.total == 0 and not self._worked:
            return reading  # the driver of some Jetsons; its other figures say nothing
        if not 0 < memory.total <= calls.MAX_BYTES or memory.total < max(
            memory.free, memory.used, reserved or 0
        ):
            raise ValueError(calls.GARBAGE)
        host = None if self._worked else self._system.host()
        if host is not None and reading.total != host.total:
            self._worked = True
        return reading

    def _may_be_unified(self, gpu: NamedDevice, failed: Failures) -> bool:
        """Tell whether a GPU may lack own memory: no bus window (BAR1), as one failed call proves nothing."""
        if self._worked:
            return False
        if self._has_bar1 is None:
            errors: Failures = {}
            bar1 = query(self._nvml, self._nvml.nvmlDeviceGetBAR1MemoryInfo, gpu.handle, "memory", errors)
            failed |= errors
            if errors:
                return False
            self._has_bar1 = bar1 is not None and bar1.bar1Total != 0
        return not self._has_bar1

    def _placement(self, device: NamedDevice, gpu: NamedDevice, failed: Failures) -> _Placement:
        """Return where a device's memory is, or was when the driver last answered."""
        known = self._placements.get(device.uuid)
        if known is not None and device.uuid not in self._due:
            return known
        possible = _COHERENT_PRODUCT.search(device.name or "") is not None
        try:
            found = self._placed(calls.call_function(self._nvml, "nvmlDeviceGetNumaNodeId", device.handle))
        except self._nvml.NVMLError as error:
            calls.raise_if_gone(error)
            told = known is not None and known.node is not None  # then it is supported
            if told or error.value not in calls.UNSUPPORTED:
                failed["node"] = calls.GARBAGE
                return known or _Placement(coherent=possible)
            # A driver without the query may have nodes too: to see less never makes a harsher verdict.
            found = _Placement(coherent=possible and error.value != calls.NOT_SUPPORTED)
        if not found.coherent and device.uuid != gpu.uuid:
            # Whether an instance is asked for its own node or has its GPU's is not documented.
            found = found._replace(coherent=self._placement(gpu, gpu, failed).coherent)
        mode = query(self._nvml, self._addressing_mode, gpu.handle, "", {})
        self._placements[device.uuid] = found = found._replace(addressing_mode=mode)
        self._due.discard(device.uuid)
        return found

    def _placed(self, node: object) -> _Placement:
        if not isinstance(node, int) or not 0 <= node <= _LAST_NODE:
            return _Placement(coherent=False)
        if self._system.has_processors(node):  # the node beside the GPU, and not the GPU's memory
            return _Placement(coherent=False)
        return _Placement(coherent=True, node=node)

    def _addressing_mode(self, handle: Handle) -> str | None:
        mode = calls.call_function(self._nvml, "nvmlDeviceGetAddressingMode", handle)
        return _ADDRESSING.get(mode) if isinstance(mode, int) else None
