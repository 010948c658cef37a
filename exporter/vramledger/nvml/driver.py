"""NVML's answers as readings: base units, and None for whatever the driver does not say.

The only module that imports pynvml. It keeps no history beyond what NVML's own questions need, and
judges nothing: states and books are made elsewhere.
"""

from __future__ import annotations

import ctypes
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import pynvml

from vramledger.errors import DriverError
from vramledger.nvml import answers
from vramledger.nvml.answers import DRIVER_GONE, LOST, NO_SUCH_FUNCTION, NONE_32, NONE_64, UNSUPPORTED, Handle
from vramledger.nvml.hardware import QUESTIONS, SLOW, SLOW_PACE, Question
from vramledger.nvml.lists import ProcessList, UtilizationLog, merge
from vramledger.readings import DeviceReading, HardwareValue, MemoryReading, ProcessEntry, XidEvent

_NO_DEVICES: Final = (
    "no-devices",
    "the NVIDIA driver is loaded but has no GPU; look for one with 'lspci -d 10de:' and into dmesg",
)
_OPEN_FAILURES: Final = {
    answers.LIBRARY_NOT_FOUND: (
        "no-library",
        "libnvidia-ml.so.1 is not here; install the NVIDIA driver, or give the container GPUs (--gpus all)",
    ),
    answers.FUNCTION_NOT_FOUND: (
        "version-mismatch",
        "libnvidia-ml.so.1 is too old for this program; install a driver of the 410 series or newer",
    ),
    answers.DRIVER_NOT_LOADED: (
        "no-driver",
        "the NVIDIA kernel module is not loaded; run 'modprobe nvidia', and look into dmesg if that fails",
    ),
    answers.LIB_RM_VERSION_MISMATCH: (
        "version-mismatch",
        "libnvidia-ml.so.1 and the kernel module differ in version; reboot, or reload the nvidia modules",
    ),
    answers.NO_PERMISSION: (
        "no-permission",
        "no access to the NVIDIA driver; run as root, or let this user open /dev/nvidiactl and /dev/nvidia*",
    ),
    answers.NOT_FOUND: _NO_DEVICES,
    answers.GPU_NOT_FOUND: _NO_DEVICES,
}
_EVENTS_AT_ONCE: Final = 100
_PERCENT: Final = 100
_LAST_CUDA: Final = 10**6
_LAST_MINOR: Final = 2**20 - 1  # the kernel has 20 bits
_UUID: Final = re.compile(r"(GPU|MIG)-[\w/.-]{1,90}", re.ASCII)


class _LostError(Exception):
    """The GPU has fallen off the bus: whatever else was to be asked is void."""


def _raise_if_gone(error: pynvml.NVMLError) -> None:
    """Raise for an error that is the whole driver's or the whole GPU's; return for any other.

    Raises:
        DriverError: the driver is gone for all devices.
        _LostError: this GPU is gone.
    """
    if error.value in DRIVER_GONE:
        reason = "driver-lost"
        message = f"the NVIDIA driver has gone away ({error}); if it does not come back, look into dmesg"
        raise DriverError(reason, message) from error
    if error.value in LOST:
        raise _LostError from error


def _ask(question: Callable[[Handle], Any], handle: Handle, name: str, failed: list[str]) -> Any:  # noqa: ANN401  # the question's own type
    """Return the answer; None when there is none, with ``name`` in ``failed`` unless it is unsupported.

    Raises:
        DriverError: the driver is gone for all devices.
        _LostError: this GPU is gone.
    """
    try:
        return question(handle)
    except pynvml.NVMLError as error:
        _raise_if_gone(error)
        if error.value not in UNSUPPORTED:
            failed.append(name)
    except (pynvml.NVMLLibraryMismatchError, UnicodeDecodeError):
        pass  # a function of another version; a name that is no text (nvitop met one)
    except ValueError:
        failed.append(name)  # garbage
    return None


def _answer(question: Question, handle: Handle, values: dict[str, HardwareValue], failed: list[str]) -> None:
    value = _ask(partial(question.ask, pynvml), handle, question.key, failed)
    if value is not None:
        values[question.key] = value


def _utilization(handle: Handle) -> dict[str, float] | None:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    values = {"gpu": rates.gpu, "memory": rates.memory}
    if any(value > _PERCENT and value != NONE_32 for value in values.values()):
        raise pynvml.NVMLError(answers.UNKNOWN)
    return {name: value / 100 for name, value in values.items() if value != NONE_32} or None


class _Identity(NamedTuple):
    """What a GPU is, in the order of DeviceReading's fields behind ``index``."""

    uuid: str
    name: str | None = None
    pci_bus_id: str | None = None
    minor: int | None = None


class _Instance(NamedTuple):
    """A MIG instance: its handle, and the fields of DeviceReading of the same names."""

    handle: Handle
    uuid: str
    name: str | None
    mig_profile: str | None
    gpu_instance: int | None
    compute_instance: int | None


def _uuid(handle: Handle) -> str:
    """Return the identity of a GPU or an instance.

    Raises:
        NVMLError: there is none, or it is garbage, which must not become another GPU's account.
    """
    try:
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except UnicodeDecodeError:
        uuid = ""
    if not _UUID.fullmatch(uuid):
        raise pynvml.NVMLError(answers.UNKNOWN)
    return uuid


def _minor(handle: Handle) -> int:
    minor = int(pynvml.nvmlDeviceGetMinorNumber(handle))
    if minor > _LAST_MINOR:
        raise pynvml.NVMLError(answers.UNKNOWN)
    return minor


def _pci_bus_id(handle: Handle) -> str:
    """Return the address as sysfs writes it: NVML's domain has eight digits, sysfs' has four."""
    domain, _, rest = pynvml.nvmlDeviceGetPciInfo(handle).busId.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _mig_mode(handle: Handle) -> list[int]:
    """Return whether MIG is on, and whether it will be after the next reset."""
    mode: list[int] = pynvml.nvmlDeviceGetMigMode(handle)
    if mode[0] not in {pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_DISABLE}:
        raise pynvml.NVMLError(answers.UNKNOWN)
    return mode


def _mig_profile(handle: Handle, name: str | None, failed: list[str]) -> str | None:
    """Return ``1g.18gb`` from the name (``NVIDIA H200 MIG 1g.18gb``), else made from the attributes."""
    found = re.search(r"\bMIG (\S+)$", name or "")
    if found:
        return found[1]
    attributes = _ask(pynvml.nvmlDeviceGetAttributes, handle, "mig", failed)
    if attributes is None:
        return None
    size = f"{attributes.gpuInstanceSliceCount}g.{round(attributes.memorySizeMB / 1024)}gb"
    compute = attributes.computeInstanceSliceCount
    return size if compute == attributes.gpuInstanceSliceCount else f"{compute}c.{size}"


class DeviceReader:
    """Reads one GPU, and its instances where MIG divides it; used by one thread.

    A new one has asked nothing yet: the first question wakes the GPU, and may hang.

    Attributes:
        index: NVML's index of the GPU.
        open_error: NVML's code when the GPU gave no handle at the last attempt, None when it did.
    """

    def __init__(self, index: int, collectors: frozenset[str]) -> None:
        self.index = index
        wanted = [each for each in QUESTIONS if each.collector in collectors]
        self._fast = [each for each in wanted if each.pace != SLOW]
        self._slow = [each for each in wanted if each.pace == SLOW]
        self._lists = [
            (kind, ProcessList(pynvml, f"nvmlDeviceGet{name}RunningProcesses"))
            for kind, name in (("C", "Compute"), ("G", "Graphics"), ("M", "MPSCompute"))
        ]
        self._utilization_log = UtilizationLog(pynvml)
        self._memory_v2 = True
        self._memory_worked = False
        self._slow_due = float("-inf")
        self._slow_values: dict[str, HardwareValue] = {}
        self._slow_failed: list[str] = []
        self._instances: list[_Instance] | None = None  # None: MIG does not divide the GPU
        self._layout_known = False
        self._handle: Handle = None
        self._identity = _Identity(f"GPU-unknown-{index}")
        self._incomplete = False  # a part of the identity was not to be had
        self.open_error: int | None = None

    @property
    def identity(self) -> DeviceReading:
        """The GPU as far as it is known, without data."""
        known = self._identity
        return DeviceReading(self.index, known.uuid, known.name, known.pci_bus_id, known.minor)

    @property
    def uuid(self) -> str:
        """The GPU's UUID, ``GPU-unknown-INDEX`` as long as it does not tell."""
        return self._identity.uuid

    def open(self) -> None:
        """Get handle and identity; :meth:`read` does so itself, now and then, as long as there are none.

        Raises:
            DriverError: ``driver-lost``, the driver is gone for all devices.
        """
        self.open_error = self._open()

    def _open(self) -> int | None:
        """Return NVML's error when the GPU has no handle or identity to give."""
        failed: list[str] = []
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(self.index)
            self._identity = _Identity(
                uuid=_uuid(handle),
                name=_ask(pynvml.nvmlDeviceGetName, handle, "name", failed),
                pci_bus_id=_ask(_pci_bus_id, handle, "pci_bus_id", failed),
                minor=_ask(_minor, handle, "minor", failed),
            )
            self._handle = handle
            self._incomplete = bool(failed)
        except _LostError:
            return answers.GPU_IS_LOST
        except pynvml.NVMLError as error:
            if error.value not in LOST:
                _raise_if_gone(error)
            return int(error.value)
        return None

    def read(self, wall: float, monotonic: float) -> tuple[DeviceReading, ...]:
        """Read the GPU, then its MIG instances; ``wall`` and ``monotonic`` are the clocks, in seconds.

        A divided GPU has ``divided`` set and no memory, processes or utilisation of its own.

        Raises:
            DriverError: ``driver-lost``, the driver is gone for all devices.
        """
        started = time.perf_counter()
        slow = monotonic >= self._slow_due
        if slow:
            self._slow_due = monotonic + SLOW_PACE
        # A GPU that is lost is looked for every now and then, what may be back at any moment each time.
        if self._incomplete or (self._handle is None and (slow or self.open_error not in LOST)):
            self.open()
        if self._handle is None:
            if self.open_error in LOST:
                return self._lost(started)
            self._slow_due = float("-inf")  # everything anew when it opens
            return (DeviceReading(self.index, *self._identity, error="failed", failed=("handle",)),)
        failed: list[str] = []
        try:
            if slow or not self._layout_known:
                self._read_layout(failed)
            reading = self._read_gpu(wall, failed, started, slow=slow)
            return reading, *(self._read_instance(each) for each in self._instances or ())
        except _LostError:
            self._slow_due = float("-inf")  # everything anew when it comes back
            return self._lost(started)

    def _lost(self, started: float) -> tuple[DeviceReading, ...]:
        reading = self._of_gpu(started, error="lost", divided=self._instances is not None)
        return reading, *(self._of_instance(each, error="lost") for each in self._instances or ())

    def _of_gpu(self, started: float, **read: Any) -> DeviceReading:  # noqa: ANN401  # DeviceReading's fields
        return DeviceReading(self.index, *self._identity, duration=time.perf_counter() - started, **read)

    def _read_gpu(self, wall: float, failed: list[str], started: float, *, slow: bool) -> DeviceReading:
        divided = self._instances is not None
        book: dict[str, Any] = {} if divided else self._read_book(wall, failed)
        hardware = self._read_hardware(failed, slow=slow)
        answered = hardware or any(value is not None for value in book.values())
        return self._of_gpu(
            started,
            divided=divided,
            error="failed" if failed and not answered else None,
            hardware=hardware,
            failed=tuple(failed),
            **book,
        )

    def _read_book(self, wall: float, failed: list[str]) -> dict[str, Any]:
        handle = self._handle
        # Memory and holders first and together, so that the book is of one moment.
        memory = self._read_memory(handle, failed)
        processes = self._read_processes(handle, failed)
        listed = None if processes is None else {entry.pid for entry in processes}
        return {
            "memory": memory,
            "processes": processes,
            "utilization": _ask(_utilization, handle, "utilization", failed),
            "process_utilization": _ask(
                partial(self._utilization_log.read, wall=wall, listed_pids=listed),
                handle,
                "process_utilization",
                failed,
            ),
        }

    def _read_hardware(self, failed: list[str], *, slow: bool) -> dict[str, HardwareValue]:
        values: dict[str, HardwareValue] = {}
        for question in self._fast:
            _answer(question, self._handle, values, failed)
        asked = self._slow if slow else [each for each in self._slow if each.key in self._slow_failed]
        if slow:
            self._slow_values = {}
        self._slow_failed = []
        for question in asked:  # what has failed is asked again at once, not in ten seconds
            _answer(question, self._handle, self._slow_values, self._slow_failed)
        values.update(self._slow_values)
        failed += self._slow_failed
        return values

    def _read_memory(self, handle: Handle, failed: list[str]) -> MemoryReading | None:
        reading: MemoryReading | None = _ask(self._ask_memory, handle, "memory", failed)
        return reading

    def _ask_memory(self, handle: Handle) -> MemoryReading | None:
        reserved = None
        try:
            version = pynvml.nvmlMemory_v2 if self._memory_v2 else None
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            if self._memory_v2 and memory.reserved != NONE_64:
                reserved = memory.reserved
        except pynvml.NVMLError as error:
            if self._memory_worked and error.value in UNSUPPORTED:  # it was answered before
                raise pynvml.NVMLError(answers.UNKNOWN) from error
            if not self._memory_v2 or error.value not in NO_SUCH_FUNCTION:
                raise
            self._memory_v2 = False  # a driver before 510
            return self._ask_memory(handle)
        reading = MemoryReading(memory.total, memory.free, memory.used, reserved)
        if NONE_64 in reading and not self._memory_worked:
            return None
        if not 0 < memory.total <= answers.MOST_BYTES or memory.total < max(
            memory.free, memory.used, reserved or 0
        ):
            raise pynvml.NVMLError(answers.UNKNOWN)
        self._memory_worked = True
        return reading

    def _read_processes(self, handle: Handle, failed: list[str]) -> tuple[ProcessEntry, ...] | None:
        lists = []
        errors: list[str] = []
        for kind, process_list in self._lists:
            rows = _ask(process_list.read, handle, "processes", errors)
            if rows is not None:
                lists.append((kind, rows))
            elif (
                errors or kind == "C"
            ):  # graphics and MPS may be unsupported; without compute we know nothing
                failed += errors
                return None
        try:
            return merge(lists)
        except ValueError:
            failed.append("processes")
            return None

    def _read_layout(self, failed: list[str]) -> None:
        """Find out whether MIG divides the GPU, and into what; keep the old layout when that fails."""
        errors: list[str] = []
        instances = None
        mode = _ask(_mig_mode, self._handle, "mig", errors)
        if mode is not None and mode[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
            count = _ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, self._handle, "mig", errors) or 0
            if count > answers.MOST_DEVICES:
                errors.append("mig")
                count = 0
            found = [self._find_instance(position, errors) for position in range(count)]
            instances = [each for each in found if each is not None]
        self._layout_known = not errors
        failed += errors[:1]
        if not errors:
            self._instances = instances

    def _find_instance(self, position: int, failed: list[str]) -> _Instance | None:
        """Return the instance at a position, None where there is none: positions have gaps."""
        try:
            handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, position)
        except pynvml.NVMLError as error:
            _raise_if_gone(error)
            if error.value not in {answers.NOT_FOUND, answers.INVALID_ARGUMENT}:
                failed.append("mig")
            return None
        uuid = _ask(_uuid, handle, "mig", failed)
        if uuid is None:
            return None
        name = _ask(pynvml.nvmlDeviceGetName, handle, "mig", failed)
        return _Instance(
            handle,
            uuid,
            name,
            _mig_profile(handle, name, failed),
            _ask(pynvml.nvmlDeviceGetGpuInstanceId, handle, "mig", failed),
            _ask(pynvml.nvmlDeviceGetComputeInstanceId, handle, "mig", failed),
        )

    def _read_instance(self, instance: _Instance) -> DeviceReading:
        started = time.perf_counter()
        failed: list[str] = []
        memory = self._read_memory(instance.handle, failed)
        processes = self._read_processes(instance.handle, failed)
        if failed:
            self._layout_known = False  # it may have been destroyed: look again at the next sample
        return self._of_instance(
            instance,
            error="failed" if failed and memory is None and processes is None else None,
            duration=time.perf_counter() - started,
            memory=memory,
            processes=processes,
            failed=tuple(failed),
        )

    def _of_instance(self, instance: _Instance, **read: Any) -> DeviceReading:  # noqa: ANN401  # DeviceReading's fields
        return DeviceReading(
            index=self.index,
            uuid=instance.uuid,
            name=instance.name,
            pci_bus_id=self._identity.pci_bus_id,
            minor=self._identity.minor,
            parent=self._identity.uuid,
            mig_profile=instance.mig_profile,
            gpu_instance=instance.gpu_instance,
            compute_instance=instance.compute_instance,
            **read,
        )


class Driver:
    """The driver library, initialised; :meth:`close` releases every handle that it holds.

    Attributes:
        driver_version: e.g. ``580.159.04``, None when it does not say.
        cuda_version: highest CUDA version that the driver supports, e.g. ``13.0``.
    """

    def __init__(self) -> None:
        self.driver_version: str | None = None
        self.cuda_version: str | None = None
        self._event_set: Handle = None
        self._event_uuids: dict[int | None, str] | None = None  # None: to be registered

    @classmethod
    def open(cls) -> Driver:
        """Initialise NVML.

        Raises:
            DriverError: there is no driver to use, or no GPU; reason and message say which.
        """
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _open_error(error) from error
        driver = cls()
        try:
            driver._ask_versions()
            count = driver.device_count()
        except DriverError:
            driver.close()
            raise
        if count == 0:
            driver.close()
            raise DriverError(*_NO_DEVICES)
        return driver

    def _ask_versions(self) -> None:
        failed: list[str] = []
        cuda: int | None = None
        with suppress(_LostError):  # no answer to these questions that makes sense, and no reason to fail
            self.driver_version = _ask(lambda _: pynvml.nvmlSystemGetDriverVersion(), None, "", failed)
            cuda = _ask(lambda _: pynvml.nvmlSystemGetCudaDriverVersion_v2(), None, "", failed)
        if cuda is not None and 0 < cuda <= _LAST_CUDA:
            self.cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}"

    def close(self) -> None:
        """Let go of the driver, so that a GPU can be reset; errors no longer matter."""
        try:
            if self._event_set is not None:
                pynvml.nvmlEventSetFree(self._event_set)
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass
        self._event_set = self._event_uuids = None

    def device_count(self) -> int:
        """Ask how many GPUs there are now, lost ones included.

        Raises:
            DriverError: ``driver-lost``; or as :meth:`open` for any other error.
        """
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            if error.value in DRIVER_GONE:
                _raise_if_gone(error)
            raise _open_error(error) from error
        if count > answers.MOST_DEVICES:
            raise _open_error(pynvml.NVMLError(answers.UNKNOWN))
        return count

    def readers(self, collectors: frozenset[str]) -> list[DeviceReader]:
        """Return a reader for every GPU, in NVML's order, lost ones included; none is open yet.

        Raises:
            DriverError: the driver is gone.
        """
        return [DeviceReader(index, collectors) for index in range(self.device_count())]

    def wait_events(self, timeout_seconds: float) -> list[XidEvent]:
        """Wait for XID errors, at most so long; where no GPU tells of them it is a mere pause.

        Raises:
            DriverError: ``driver-lost``.
        """
        try:
            if self._event_uuids is None:
                self._register_events()
            if self._event_uuids:
                return self._collect_events(timeout_seconds)
        except _LostError:
            self._event_uuids = None  # register anew, without the lost GPU
        except pynvml.NVMLError as error:
            if error.value in DRIVER_GONE:
                _raise_if_gone(error)
            self._event_uuids = None
        time.sleep(timeout_seconds)  # what failed at once may do so for ever
        return []

    @property
    def watches_events(self) -> bool:
        """Whether every GPU that has XID events is asked for them."""
        return self._event_uuids is not None

    def _register_events(self) -> None:
        """Make an event set of all GPUs that can tell of XID errors; the others are left out."""
        if self._event_set is not None:
            old, self._event_set = self._event_set, None
            pynvml.nvmlEventSetFree(old)
        uuids: dict[int | None, str] = {}
        failed: list[str] = []
        self._event_set = _ask(lambda _: pynvml.nvmlEventSetCreate(), None, "events", failed)
        for index in range(self.device_count() if self._event_set is not None else 0):
            try:
                handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index, "events", failed)
                uuid = None if handle is None else _ask(self._register, handle, "events", failed)
            except _LostError:
                continue
            if uuid is not None:
                uuids[_address(handle)] = uuid
        self._event_uuids = None if failed and not uuids else uuids

    def _register(self, handle: Handle) -> str | None:
        """Register a GPU's XID errors; return its UUID, None when it has no such event."""
        xid = pynvml.nvmlEventTypeXidCriticalError
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & xid:
            return None
        pynvml.nvmlDeviceRegisterEvents(handle, xid, self._event_set)
        return _uuid(handle)

    def _collect_events(self, timeout_seconds: float) -> list[XidEvent]:
        """Wait for the first event, and take those along that are queued behind it."""
        events: list[XidEvent] = []
        wait = max(1, round(timeout_seconds * 1000))
        while len(events) < _EVENTS_AT_ONCE:
            try:
                data = pynvml.nvmlEventSetWait(self._event_set, wait)
            except pynvml.NVMLError as error:
                if error.value == answers.TIMEOUT or events:
                    break
                _raise_if_gone(error)
                raise
            uuid = (self._event_uuids or {}).get(_address(data.device))
            if uuid is not None:
                events.append(XidEvent(uuid, int(data.eventData), time.time()))
            wait = 0
        return events


def check_access(readers: Iterable[DeviceReader]) -> None:
    """Look at readers that were opened, or are still about it.

    Raises:
        DriverError: ``no-permission``, we may use none of the GPUs.
    """
    if {reader.open_error for reader in readers} == {answers.NO_PERMISSION}:
        raise DriverError(*_OPEN_FAILURES[answers.NO_PERMISSION])


def _address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _open_error(error: pynvml.NVMLError) -> DriverError:
    if error.value in _OPEN_FAILURES:
        return DriverError(*_OPEN_FAILURES[error.value])
    return DriverError("internal", f"NVML does not work ({error}); see whether nvidia-smi does, and dmesg")
