"""Open the driver library, count its GPUs, wait for their errors, close it; only here is pynvml named."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from types import ModuleType
from typing import Final

from vramledger.errors import DriverError
from vramledger.model.reading import XidEvent
from vramledger.readers.hosts.gpu_sleep import GpuSleep, SleepWatch
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, SystemMemory
from vramledger.readers.nvml import calls as return_codes
from vramledger.readers.nvml.calls import (
    DRIVER_GONE,
    DeviceLostError,
    Failures,
    Handle,
    query,
    raise_if_gone,
    read_uuid,
)
from vramledger.readers.nvml.device_reader import DeviceReader

_UNUSED = "ctypes.util"
"""What pynvml imports and does not use: that takes 8 ms and 1.5 MiB."""


def _find_library(name: str) -> str | None:
    from ctypes.util import find_library  # noqa: PLC0415 see above

    return find_library(name)


if _UNUSED in sys.modules:
    import pynvml
else:
    _placeholder = ModuleType(_UNUSED)
    _placeholder.find_library = _find_library  # type: ignore[attr-defined]
    sys.modules[_UNUSED] = _placeholder
    try:
        import pynvml
    finally:
        del sys.modules[_UNUSED]

_NO_DEVICES: Final = (
    "no-devices",
    "the NVIDIA driver is loaded but has no GPU; look for one with 'lspci -d 10de:' and in dmesg",
)
_OPEN_FAILURES: Final = {
    return_codes.LIBRARY_NOT_FOUND: (
        "no-library",
        "libnvidia-ml.so.1 was not found; install the NVIDIA driver, or give the container GPUs (--gpus all)",
    ),
    return_codes.FUNCTION_NOT_FOUND: (
        "version-mismatch",
        "libnvidia-ml.so.1 is too old for this program; install a driver of the 410 series or newer",
    ),
    return_codes.DRIVER_NOT_LOADED: (
        "no-driver",
        "the NVIDIA kernel module is not loaded; run 'modprobe nvidia', and see dmesg if that fails",
    ),
    return_codes.LIB_RM_VERSION_MISMATCH: (
        "version-mismatch",
        (
            "libnvidia-ml.so.1 and the kernel module have different versions; reboot, or "
            "reload the nvidia modules"
        ),
    ),
    return_codes.NO_PERMISSION: (
        "no-permission",
        "no access to the NVIDIA driver; run as root, or let this user open /dev/nvidiactl and /dev/nvidia*",
    ),
    return_codes.NOT_FOUND: _NO_DEVICES,
    return_codes.GPU_NOT_FOUND: _NO_DEVICES,
}
_EVENTS_AT_ONCE: Final = 100
_RETRY: Final = 0.5
_LAST_CUDA: Final = 10**6


class Driver:
    """The driver library, initialised; :meth:`close` releases every handle that it holds."""

    def __init__(self) -> None:
        self.driver_version: str | None = None  # e.g. ``580.159.04``, None when not reported
        self.cuda_version: str | None = None  # highest CUDA version that the driver supports, e.g. ``13.0``
        self._event_set: Handle = None
        self._event_uuids: dict[int | None, str] | None = None  # None: not registered yet
        self._sleep = GpuSleep()
        self._asleep: tuple[str, ...] = ()  # not registered, as this would wake them

    @classmethod
    def open(cls) -> Driver:
        """Initialise NVML. Raises DriverError without a driver or GPU; reason and message say which."""
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise _open_error(error) from error
        driver = cls()
        try:
            driver._read_versions()
            count = driver.device_count()
        except DriverError:
            driver.close()
            raise
        if count == 0:
            driver.close()
            raise DriverError(*_NO_DEVICES)
        return driver

    def _read_versions(self) -> None:
        failed: Failures = {}
        cuda: int | None = None
        with suppress(DeviceLostError):  # an invalid answer to these queries is not a reason to fail
            self.driver_version = query(
                pynvml, lambda _: pynvml.nvmlSystemGetDriverVersion(), None, "", failed
            )
            cuda = query(pynvml, lambda _: pynvml.nvmlSystemGetCudaDriverVersion_v2(), None, "", failed)
        if cuda is not None and 0 < cuda <= _LAST_CUDA:
            self.cuda_version = f"{cuda // 1000}.{cuda % 1000 // 10}"

    def close(self) -> None:
        """Release the driver, so that a GPU can be reset; ignore errors."""
        try:
            if self._event_set is not None:
                pynvml.nvmlEventSetFree(self._event_set)
            pynvml.nvmlShutdown()
        except pynvml.NVMLError:
            pass
        self._event_set = self._event_uuids = None

    def device_count(self) -> int:
        """Return how many GPUs there are now, lost ones included. Raises DriverError as :meth:`open`."""
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            if error.value in DRIVER_GONE:
                raise_if_gone(error)
            raise _open_error(error) from error
        if count > return_codes.MAX_DEVICES:
            raise _open_error(pynvml.NVMLError(return_codes.UNKNOWN))
        return count

    def readers(
        self,
        collectors: frozenset[str],
        system: SystemMemory | None = None,
        cgroups: DeviceMemoryCgroups | None = None,
        sleep: GpuSleep | None = None,
    ) -> list[DeviceReader]:
        """Return a reader, not open yet, for every GPU in NVML's order. Raises DriverError if it is gone."""
        system = system or SystemMemory()
        cgroups = cgroups or DeviceMemoryCgroups()
        self._sleep = sleep = sleep or self._sleep
        count = self.device_count()
        readers = [DeviceReader(pynvml, index, collectors, system, cgroups) for index in range(count)]
        for reader in readers:
            reader.sleep = SleepWatch(sleep, sleep.address(reader.index, count))
        return readers

    def wait_events(self, timeout_seconds: float) -> list[XidEvent]:
        """Wait for XID errors for at most ``timeout_seconds``; if no GPU reports them, it only pauses.

        After a failure it pauses for :data:`_RETRY` at most, because errors of that time are lost. Raises
        DriverError: ``driver-lost``.
        """
        pause = min(timeout_seconds, _RETRY)
        try:
            if self._event_uuids is None or not all(map(self._sleep.is_asleep, self._asleep)):
                self._register_events()
            if self._event_uuids:
                return self._collect_events(timeout_seconds)
            if self._event_uuids is not None:
                pause = timeout_seconds
        except DeviceLostError:
            self._event_uuids = None  # register again, without the lost GPU
        except pynvml.NVMLError as error:
            if error.value in DRIVER_GONE:
                raise_if_gone(error)
            self._event_uuids = None
        time.sleep(pause)  # a call that failed immediately may do so for ever
        return []

    @property
    def watches_events(self) -> bool:
        """Whether every GPU that has XID events is registered for them."""
        return self._event_uuids is not None

    def _register_events(self) -> None:
        if self._event_set is not None:
            old, self._event_set = self._event_set, None
            pynvml.nvmlEventSetFree(old)
        uuids: dict[int | None, str] = {}
        failed: Failures = {}
        self._event_set = query(pynvml, lambda _: pynvml.nvmlEventSetCreate(), None, "events", failed)
        count = self.device_count() if self._event_set is not None else 0
        addresses = [self._sleep.address(index, count) for index in range(count)]
        self._asleep = tuple(each for each in addresses if each is not None and self._sleep.is_asleep(each))
        for index, address in enumerate(addresses):
            if address in self._asleep:
                continue
            try:
                handle = query(pynvml, pynvml.nvmlDeviceGetHandleByIndex, index, "events", failed)
                uuid = (
                    None if handle is None else query(pynvml, self._register_device, handle, "events", failed)
                )
            except DeviceLostError:
                continue
            if uuid is not None:
                uuids[_handle_address(handle)] = uuid
        self._event_uuids = None if failed and not uuids else uuids

    def _register_device(self, handle: Handle) -> str | None:
        xid = pynvml.nvmlEventTypeXidCriticalError
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & xid:
            return None
        pynvml.nvmlDeviceRegisterEvents(handle, xid, self._event_set)
        return read_uuid(pynvml, handle)

    def _collect_events(self, timeout_seconds: float) -> list[XidEvent]:
        events: list[XidEvent] = []
        wait = max(1, round(timeout_seconds * 1000))
        while len(events) < _EVENTS_AT_ONCE:
            try:
                data = pynvml.nvmlEventSetWait(self._event_set, wait)
            except pynvml.NVMLError as error:
                if error.value == return_codes.TIMEOUT or events:
                    break
                raise_if_gone(error)
                raise
            uuid = (self._event_uuids or {}).get(_handle_address(data.device))
            if uuid is not None:
                events.append(XidEvent(uuid, int(data.eventData), time.time()))
            wait = 0
        return events


def check_access(readers: Iterable[DeviceReader]) -> None:
    """Check that we may use a GPU, opened or not. Raises DriverError (``no-permission``) otherwise."""
    if {reader.open_error for reader in readers} == {return_codes.NO_PERMISSION}:
        raise DriverError(*_OPEN_FAILURES[return_codes.NO_PERMISSION])


def _handle_address(handle: Handle) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _open_error(error: pynvml.NVMLError) -> DriverError:
    if error.value in _OPEN_FAILURES:
        return DriverError(*_OPEN_FAILURES[error.value])
    return DriverError(
        "internal", f"NVML does not work ({error}); check whether nvidia-smi works, and see dmesg"
    )
