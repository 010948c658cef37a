"""Turn one GPU's answers into readings: base units, and None for what the driver does not report.

It keeps no history beyond what NVML's own queries need, and judges nothing: states and ledgers are made
elsewhere. driver.py passes pynvml in.
"""

from __future__ import annotations

import time
from functools import partial, reduce
from typing import Any, Final, NamedTuple

from vramledger.model.device_signs import mean_activity, read_counters
from vramledger.model.reading import (
    ASLEEP,
    DeviceReading,
    HardwareValue,
    MemoryReading,
    ProcessEntry,
    ProcessUtilization,
)
from vramledger.readers.hosts.gpu_sleep import SleepWatch
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, SystemMemory
from vramledger.readers.nvml import calls
from vramledger.readers.nvml.calls import Failures, Handle, Nvml, query
from vramledger.readers.nvml.hardware import (
    HARDWARE_METRICS,
    PCIE_THROUGHPUT,
    SLOW,
    SLOW_INTERVAL,
    HardwareMetric,
)
from vramledger.readers.nvml.memory import (
    LimitReader,
    Limits,
    MemoryReader,
    NamedDevice,
    is_integrated,
    read_confidential,
    read_virtualization,
)
from vramledger.readers.nvml.mig import MigInstance, read_instances
from vramledger.readers.nvml.process_lists import ProcessList, Unchanged, merge_lists
from vramledger.readers.nvml.utilization import (
    ActivityReader,
    DeviceUtilizationLog,
    ListPace,
    RowPace,
    UtilizationLog,
    pcie_throughput,
    read_utilization,
)

_DATA: Final = ("memory", "processes", "utilization", "process_utilization")
_LAST_MINOR: Final = 2**20 - 1
"""The kernel stores a minor number in 20 bits."""


class _DeviceIdentity(NamedTuple):
    """The identity of a GPU, in the order of DeviceReading's fields after ``index``."""

    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    minor: int | None = None


class DeviceReader:
    """Read one GPU and its MIG instances, in one thread; before the first query, which may hang, nothing."""

    def __init__(
        self,
        nvml: Nvml,
        index: int,
        collectors: frozenset[str],
        system: SystemMemory | None = None,
        cgroups: DeviceMemoryCgroups | None = None,
    ) -> None:
        self._nvml = nvml
        self.index = index  # NVML's index of the GPU
        # tells when the GPU is not asked because it sleeps; None for never
        self.sleep: SleepWatch | None = None
        enabled = [each for each in HARDWARE_METRICS if each.collector in collectors]
        self._fast_metrics = [each for each in enabled if each.pace != SLOW]
        self._slow_metrics = [each for each in enabled if each.pace == SLOW]
        self._reads_pcie = any(each.key == PCIE_THROUGHPUT for each in enabled)
        self._lists = [
            (kind, ProcessList(nvml, f"nvmlDeviceGet{name}RunningProcesses"))
            for kind, name in (("C", "Compute"), ("G", "Graphics"), ("M", "MPSCompute"))
        ]
        self._unchanged = Unchanged()
        self._list_pace = ListPace()
        self._row_pace = RowPace()
        self._utilization_log = UtilizationLog(nvml)
        self._device_log = DeviceUtilizationLog(nvml)
        self._activity = ActivityReader(nvml)
        self._instance_activity: dict[int, ActivityReader] = {}
        self._system = system or SystemMemory()
        self._memory = MemoryReader(nvml, self._system)
        self._limit_reader = LimitReader(nvml, cgroups or DeviceMemoryCgroups())
        self._limits = Limits()
        self._virtualization: str | None = None
        self._confidential: str | None = None
        self._counters_hidden = True  # until the driver says that they are not
        # What the counters said at each look since the last reading, and in that reading, by monotonic time.
        self._looks: dict[float, dict[str, float]] = {}
        self._last_activity: tuple[float, dict[str, float]] | None = None
        self._answered = False
        self.cgroups: tuple[str, ...] = ()  # the cgroups whose limits are read from the next slow sample on
        self._limited: tuple[str, ...] | None = ()  # None: reading them has failed
        self._slow_due = float("-inf")
        self._slow_values: dict[str, HardwareValue] = {}
        self._slow_failed: Failures = {}
        self._instances: list[MigInstance] | None = None  # None: MIG does not divide the GPU
        self._layout_known = False
        self._handle: Handle = None
        self._identity_fields = _DeviceIdentity(f"GPU-unknown-{index}")
        self._incomplete = False  # a part of the identity was not available
        # NVML's code if the GPU gave no handle at the last attempt, otherwise None
        self.open_error: int | None = None

    @property
    def identity(self) -> DeviceReading:
        """The GPU's identity as far as it is known, without measured values."""
        known = self._identity_fields
        return DeviceReading(self.index, known.uuid, known.name, known.pci_bus_id, known.minor)

    @property
    def uuid(self) -> str:
        """The GPU's UUID, ``GPU-unknown-INDEX`` until the GPU reports one."""
        return self._identity_fields.uuid

    def open(self) -> None:
        """Get handle and identity, now or later, but wake no GPU. Raises DriverError (``driver-lost``)."""
        if self.sleep is not None and self.sleep.is_asleep():
            known = self.sleep.known()
            uuid = known.uuid or self._identity_fields.uuid
            self._identity_fields = _DeviceIdentity(uuid, known.name, self.sleep.address, known.minor)
            return
        self.open_error = self._open_device()

    def _open_device(self) -> int | None:
        nvml, failed = self._nvml, Failures()
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(self.index)
            self._identity_fields = _DeviceIdentity(
                uuid=calls.read_uuid(nvml, handle),
                name=query(nvml, nvml.nvmlDeviceGetName, handle, "name", failed),
                pci_bus_id=query(nvml, partial(_read_pci_bus_id, nvml), handle, "pci_bus_id", failed),
                minor=query(nvml, partial(_read_minor, nvml), handle, "minor", failed),
            )
            self._handle = handle
            self._incomplete = bool(failed)
            if self.sleep is not None:
                self.sleep.address = self._identity_fields.pci_bus_id or self.sleep.address
        except calls.DeviceLostError:
            return calls.GPU_IS_LOST
        except nvml.NVMLError as error:
            if error.value not in calls.LOST:
                calls.raise_if_gone(error)
            return int(error.value)
        return None

    def read_list_again(self) -> None:
        """Have the next readings read the list of processes, whatever they show; any thread may call this."""
        self._list_pace.expect_changes()

    def is_calm(self, monotonic: float) -> bool:
        """Tell whether the GPU has done and held the same for some time; this calls no driver."""
        return self._answered and self._list_pace.is_calm(monotonic) and self._row_pace.is_steady(monotonic)

    def is_unchanged(self, monotonic: float) -> bool:
        """Tell whether a reading would say of a calm GPU what the last one said: 0.3 ms instead of 3.

        What was counted until now belongs to the next reading too. Raises DriverError: ``driver-lost``, the
        driver is gone for all devices. Raises DeviceLostError if the GPU is gone.
        """
        failed: Failures = {}
        memory = self._memory.read(self._named, self._named, failed)
        activity = self._activity_since_look(monotonic, failed)
        return (
            not failed
            and self._list_pace.is_unchanged(memory.memory)
            and self._row_pace.is_unchanged(read_counters(activity))
        )

    def read(self, wall: float, monotonic: float) -> tuple[DeviceReading, ...]:
        """Read a GPU and its MIG instances; a ``divided`` one has no memory, processes or rates itself."""
        started = time.perf_counter()
        self._answered = False
        if self.sleep is not None and self.sleep.leaves_alone(monotonic):
            self._forget_activity()
            return self._readings_without_data(started, ASLEEP)
        readings = self._read_awake(wall, monotonic, started)
        if self.sleep is not None:
            self.sleep.plan_rest(readings[0], monotonic)
        return readings

    def _read_awake(self, wall: float, monotonic: float, started: float) -> tuple[DeviceReading, ...]:
        slow = monotonic >= self._slow_due
        if slow:
            self._slow_due = monotonic + SLOW_INTERVAL
        # A lost GPU is tried again every SLOW_INTERVAL seconds; a GPU without a handle or with a part of its
        # identity missing is tried again in every sample.
        if self._incomplete or (self._handle is None and (slow or self.open_error not in calls.LOST)):
            self.open()
        if self._handle is None:
            if self.open_error in calls.LOST:
                return self._readings_without_data(started, "lost")
            self._slow_due = float("-inf")  # read everything again once it opens
            return (self._unopened(),)
        failed: Failures = {}
        try:
            limits_failed: Failures = {}
            if slow:
                self._memory.look_again()
                read_mode = partial(read_virtualization, self._nvml)
                self._virtualization = query(self._nvml, read_mode, self._handle, "", {})
                self._read_confidential()
            if slow or self.cgroups != self._limited:
                self._read_limits(limits_failed)
            failed |= limits_failed
            if slow or not self._layout_known:
                self._read_mig_layout(failed)
            reading = self._read_gpu(wall, monotonic, failed, started, slow=slow)
            return reading, *(self._read_instance(each, monotonic) for each in self._instances or ())
        except calls.DeviceLostError:
            self._slow_due = float("-inf")  # read everything again once it is back
            self._list_pace.expect_changes()
            self._forget_activity()
            for reader in self._instance_activity.values():
                reader.forget()
            return self._readings_without_data(started, "lost")

    def _read_limits(self, failed: Failures) -> None:
        cgroups, bus = self.cgroups, self._identity_fields.pci_bus_id

        def read(handle: Handle) -> Limits:
            return self._limit_reader.read(handle, bus, cgroups, failed)

        limits = query(self._nvml, read, self._handle, "limits", failed)
        self._limits, self._limited = limits or Limits(), None if limits is None else cgroups

    @property
    def _integrated(self) -> bool:
        return is_integrated(self._identity_fields.name)

    @property
    def _named(self) -> NamedDevice:
        return NamedDevice(self._handle, self.uuid, self._identity_fields.name)

    def _unopened(self) -> DeviceReading:
        words = None if self.open_error is None else str(self._nvml.NVMLError(self.open_error))
        refused = self.open_error == calls.RESET_REQUIRED
        return DeviceReading(
            self.index,
            *self._identity_fields,
            error="failed",
            failed=("handle",),
            words=words,
            reset_required=refused,
        )

    def _readings_without_data(self, started: float, error: str) -> tuple[DeviceReading, ...]:
        reading = self._gpu_reading(started, error=error, divided=self._instances is not None)
        return reading, *(self._instance_reading(each, error=error) for each in self._instances or ())

    def _gpu_reading(self, started: float, **read: Any) -> DeviceReading:  # noqa: ANN401  # DeviceReading's fields
        return DeviceReading(
            self.index, *self._identity_fields, duration=time.perf_counter() - started, **read
        )

    def _read_gpu(
        self, wall: float, monotonic: float, failed: Failures, started: float, *, slow: bool
    ) -> DeviceReading:
        divided = self._instances is not None
        ledger: dict[str, Any] = (
            {} if divided else self._read_memory_and_holders(wall, monotonic, failed, slow=slow)
        )
        traffic = pcie_throughput(ledger.get("activity")) if self._reads_pcie else None
        hardware = {} if self._integrated else self._read_hardware(failed, traffic, slow=slow)
        has_data = hardware or any(ledger.get(name) is not None for name in _DATA)
        refused = failed.pop(calls.REFUSED, None)
        self._answered = bool(has_data) and not (failed or divided or self._integrated)
        return self._gpu_reading(
            started,
            divided=divided,
            virtualization=self._virtualization,
            confidential=self._confidential,
            error="failed" if failed and not has_data else None,
            hardware=hardware,
            failed=tuple(failed),
            words=refused or next(iter(failed.values()), None),
            reset_required=None if self._integrated else refused is not None,
            **({} if divided else self._limits._asdict()),
            **ledger,
        )

    def _read_memory_and_holders(
        self, wall: float, monotonic: float, failed: Failures, *, slow: bool
    ) -> dict[str, Any]:
        handle = self._handle
        # Memory and holders come first and together, so that the ledger is of one moment.
        memory = self._memory.read(self._named, self._named, failed)
        if self._integrated:
            return {**memory._asdict(), "processes": self._system.nvmap_clients()}
        processes = self._list_pace.known(memory.memory, monotonic)
        if slow or processes is None:
            processes = self._read_all_lists(memory.memory, monotonic, failed, slow=slow)
        # What the counters say comes before the rows, which it may make unnecessary.
        activity = self._activity_since_reading(monotonic, failed)
        return {
            **memory._asdict(),
            "processes": processes,
            "mps_listed": self._lists[-1][1].worked,
            "utilization": query(self._nvml, self._read_utilization, handle, "utilization", failed),
            "process_utilization": self._read_rows(wall, monotonic, processes, activity, failed),
            "activity": activity,
        }

    def _read_all_lists(
        self, memory: MemoryReading | None, monotonic: float, failed: Failures, *, slow: bool
    ) -> tuple[ProcessEntry, ...] | None:
        """Read the lists of the GPU, those of graphics and of MPS only where they can have changed."""
        self._unchanged.used = None if memory is None else memory.used
        if slow:
            self._unchanged.forget()
        processes = self._read_processes(self._handle, failed, self._unchanged)
        self._list_pace.remember(processes, monotonic)
        return processes

    def _read_rows(
        self,
        wall: float,
        monotonic: float,
        processes: tuple[ProcessEntry, ...] | None,
        activity: dict[str, float] | None,
        failed: Failures,
    ) -> tuple[ProcessUtilization, ...] | None:
        """Return the new rows of utilisation; none where they cannot say anything new yet."""
        if not self._row_pace.are_due(read_counters(activity), monotonic):
            return self._row_pace.between
        listed = None if processes is None else {entry.pid for entry in processes}
        errors: Failures = {}
        read = partial(self._utilization_log.read, wall=wall, monotonic=monotonic, listed_pids=listed)
        rows: tuple[ProcessUtilization, ...] | None
        rows = query(self._nvml, read, self._handle, "process_utilization", errors)
        self._row_pace.remember(rows, listed or (), monotonic, failed=bool(errors))
        if listed is not None and any(row.pid not in listed for row in rows or ()):
            self._list_pace.expect_changes()  # it may have come since the list was read
        failed |= errors
        return rows

    def _read_confidential(self) -> None:
        """Find out whether GPM's counters are hidden: a counter of 0 then proves nothing.

        A driver without the query has no confidential computing. One that fails says nothing, and what was
        known stays.
        """
        errors: Failures = {}
        mode = query(self._nvml, partial(read_confidential, self._nvml), self._handle, "", errors)
        if not errors:
            self._confidential, self._counters_hidden = mode, mode == "on"

    def _read_activity(self, handle: Handle, monotonic: float) -> dict[str, float]:
        if self._counters_hidden:
            self._forget_activity()
            raise self._nvml.NVMLError(calls.NOT_SUPPORTED)
        return self._activity.read(handle, monotonic)

    def _activity_since_look(self, monotonic: float, failed: Failures) -> dict[str, float] | None:
        """Return what the counters say of the time since they were last read, and keep it for the reading."""
        read = partial(self._read_activity, monotonic=monotonic)
        activity: dict[str, float] | None = query(self._nvml, read, self._handle, "activity", failed)
        if activity is not None:
            self._looks[monotonic] = activity
        return activity

    def _activity_since_reading(self, monotonic: float, failed: Failures) -> dict[str, float] | None:
        """Return what the counters say of the time since the last reading, over all looks since then."""
        if self._last_activity is not None and self._last_activity[0] == monotonic:
            return self._last_activity[1]
        if self._activity_since_look(monotonic, failed) is None:
            return None
        first, *others = self._looks.values()
        self._looks, self._last_activity = {}, (monotonic, reduce(mean_activity, others, first))
        return self._last_activity[1]

    def _forget_activity(self) -> None:
        self._looks, self._last_activity = {}, None
        self._activity.forget()

    def _read_utilization(self, handle: Handle) -> dict[str, float] | None:
        """Return the GPU's rates; without GPM also the highest one since the previous reading."""
        rates = read_utilization(self._nvml, handle)
        if rates is not None and (self._counters_hidden or self._activity.unsupported):
            peak = query(self._nvml, self._device_log.highest, handle, "utilization", {})
            if peak is not None:
                rates["gpu_peak"] = peak
        return rates

    def _read_hardware(
        self, failed: Failures, traffic: dict[str, float] | None, *, slow: bool
    ) -> dict[str, HardwareValue]:
        values: dict[str, HardwareValue] = {}
        for metric in self._fast_metrics:
            _query_hardware_metric(self._nvml, metric, self._handle, values, failed)
        queried = (
            self._slow_metrics
            if slow
            else [each for each in self._slow_metrics if each.key in self._slow_failed]
        )
        if slow:
            self._slow_values = {}
        self._slow_failed = {}
        if traffic is not None:
            queried = [each for each in queried if each.key != PCIE_THROUGHPUT]  # 20 ms for what GPM says too
            self._slow_values.pop(PCIE_THROUGHPUT, None)
            values[PCIE_THROUGHPUT] = traffic
        elif not (slow or self._activity.unsupported or PCIE_THROUGHPUT in self._slow_values):
            queried = [each for each in self._slow_metrics if each in queried or each.key == PCIE_THROUGHPUT]
        for metric in queried:  # a failed query is repeated in the next sample, not in ten seconds
            _query_hardware_metric(self._nvml, metric, self._handle, self._slow_values, self._slow_failed)
        values.update(self._slow_values)
        failed |= self._slow_failed
        return values

    def _read_processes(
        self, handle: Handle, failed: Failures, unchanged: Unchanged | None = None
    ) -> tuple[ProcessEntry, ...] | None:
        """Read a device's lists; all, unless ``unchanged`` tells that only compute processes can differ."""
        lists: list[tuple[str, tuple[tuple[int, ...], ...]]] = []
        errors: Failures = {}
        for kind, process_list in self._lists:
            if kind != "C" and unchanged is not None and unchanged.only_compute(lists[0][1]):
                break
            rows = query(self._nvml, process_list.read, handle, "processes", errors)
            if rows is not None:
                lists.append((kind, tuple(rows)))
            elif errors or kind == "C":
                # Graphics and MPS may be unsupported; without compute we know nothing.
                failed |= errors
                return None
        try:
            merged = merge_lists(lists, failed)
        except ValueError:
            failed["processes"] = calls.GARBAGE
            return None
        if unchanged is not None:
            unchanged.remember(lists)
        return merged

    def _read_mig_layout(self, failed: Failures) -> None:
        """Find out whether MIG divides the GPU, and into what; keep the old layout if that fails."""
        errors: Failures = {}
        instances = read_instances(self._nvml, self._handle, errors)
        self._layout_known = not errors
        failed |= errors
        if not errors:
            self._instances = instances
            if instances is not None:
                self._forget_activity()
                self._list_pace.expect_changes()
            present = {instance.gpu_instance for instance in instances or ()}
            for number in [each for each in self._instance_activity if each not in present]:
                self._instance_activity.pop(number).close()

    def _read_instance_activity(
        self, instance: MigInstance, monotonic: float, failed: Failures
    ) -> dict[str, float] | None:
        """Read the counters of the GPU instance, which compute instances on it share."""
        number = instance.gpu_instance
        if number is None or self._counters_hidden:
            return None
        reader = self._instance_activity.get(number)
        if reader is None:
            reader = self._instance_activity[number] = ActivityReader(self._nvml, number)
        read = partial(reader.read, monotonic=monotonic)
        answer: dict[str, float] | None = query(self._nvml, read, self._handle, "activity", failed)
        return answer

    def _read_instance(self, instance: MigInstance, monotonic: float) -> DeviceReading:
        started = time.perf_counter()
        failed: Failures = {}
        named = NamedDevice(instance.handle, instance.uuid, self._identity_fields.name)
        memory = self._memory.read(named, self._named, failed)
        processes = self._read_processes(instance.handle, failed)
        if failed:
            self._layout_known = False  # the instance may have been destroyed: look again at the next sample
        activity = self._read_instance_activity(instance, monotonic, failed)
        refused = failed.pop(calls.REFUSED, None)
        return self._instance_reading(
            instance,
            error="failed" if failed and memory.memory is None and processes is None else None,
            duration=time.perf_counter() - started,
            **memory._asdict(),
            processes=processes,
            mps_listed=self._lists[-1][1].worked,
            activity=activity,
            failed=tuple(failed),
            words=refused or next(iter(failed.values()), None),
        )

    def _instance_reading(self, instance: MigInstance, **read: Any) -> DeviceReading:  # noqa: ANN401  # DeviceReading's fields
        return DeviceReading(
            index=self.index,
            uuid=instance.uuid,
            name=instance.name,
            pci_bus_id=self._identity_fields.pci_bus_id,
            minor=self._identity_fields.minor,
            parent=self._identity_fields.uuid,
            mig_profile=instance.mig_profile,
            gpu_instance=instance.gpu_instance,
            compute_instance=instance.compute_instance,
            mig_placement=instance.mig_placement,
            **read,
        )


def _query_hardware_metric(
    nvml: Nvml, metric: HardwareMetric, handle: Handle, values: dict[str, HardwareValue], failed: Failures
) -> None:
    value = query(nvml, partial(metric.read, nvml), handle, metric.key, failed)
    if value is not None:
        values[metric.key] = value


def _read_minor(nvml: Nvml, handle: Handle) -> int:
    minor = int(nvml.nvmlDeviceGetMinorNumber(handle))
    if minor > _LAST_MINOR:
        raise nvml.NVMLError(calls.UNKNOWN)
    return minor


def _read_pci_bus_id(nvml: Nvml, handle: Handle) -> str:
    """Return the address as sysfs writes it: NVML's domain has eight digits, that of sysfs four."""
    domain, _, rest = nvml.nvmlDeviceGetPciInfo(handle).busId.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"
