"""Read each GPU in a thread of its own, so that only one GPU's data is missing when a call hangs."""

from __future__ import annotations

import collections
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from vramledger.errors import DriverError
from vramledger.logs import FailureStreaks
from vramledger.model.device_signs import mean_activity
from vramledger.model.reading import ASLEEP, DeviceReading, XidEvent
from vramledger.readers.collector import Collector, Context, Health, Part
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver
from vramledger.readers.nvml.hardware import HARDWARE_METRICS

OPEN_TIMEOUT = 5.0
"""Seconds that the start waits for GPUs, which may need waking; one that hangs delays no other."""

EVENT_WAIT = 5.0
"""Seconds for which the driver is asked to wait for an XID error; one that comes ends the wait at once."""

DEVICE_COLLECTORS = frozenset({"ledger", "hardware", "energy", "pcie"})
"""The device threads read the data of these collectors in one call, so the collectors share its duration."""

_COLLECTOR_BY_QUERY = {
    **{question.key: question.collector for question in HARDWARE_METRICS},
    "utilization": "hardware",
    "process_utilization": "process",
    "activity": "process",
    "limits": "limits",
}


def failed_collectors(devices: Iterable[DeviceReading]) -> Iterator[str]:
    """Yield the collectors that lack an answer; a query of no other collector is the ledger's."""
    for device in devices:
        if device.error not in (None, ASLEEP):
            yield "ledger"
        for name in device.failed:
            yield _COLLECTOR_BY_QUERY.get(name, "ledger")


def with_work_of(old: DeviceReading | None, new: DeviceReading) -> DeviceReading:
    """Return a device's newer reading, with the work that only its earlier reading shows."""
    if old is None or old is new or new.error is not None:
        return new
    rows, activity = new.process_utilization, new.activity
    if old.process_utilization:
        rows = (*old.process_utilization, *(rows or ()))
    if activity and old.activity and activity != old.activity:
        activity = mean_activity(old.activity, activity)
    return replace(new, process_utilization=rows, activity=activity)


class _DeviceThread(threading.Thread):
    """Read one GPU on request; a thread that still works on a request is busy and accepts no other."""

    def __init__(self, reader: DeviceReader, finished: queue.SimpleQueue[_DeviceThread]) -> None:
        super().__init__(name="vramledger-device", daemon=True)
        self.busy = False
        self.result: tuple[DeviceReading, ...] | DriverError = ()
        self.unchanged = False
        self.known: tuple[DeviceReading, ...] = (reader.identity,)
        self._late: tuple[DeviceReading, ...] = ()
        self._reader = reader
        self._finished = finished
        self._requests: queue.SimpleQueue[Callable[[], tuple[DeviceReading, ...]]] = queue.SimpleQueue()
        self._failing = FailureStreaks("Reading a GPU failed")

    def open(self) -> None:
        def work() -> tuple[DeviceReading, ...]:
            self._reader.open()
            return (self._reader.identity,)

        self.busy = True
        self._requests.put(work)

    def request_reading(self, wall: float, monotonic: float) -> None:
        self.busy = True
        self._requests.put(lambda: self._reader.read(wall, monotonic))

    def request_look(self, monotonic: float) -> None:
        def work() -> tuple[DeviceReading, ...]:
            self.unchanged = self._reader.is_unchanged(monotonic)
            return ()

        self.busy, self.unchanged = True, False
        self._requests.put(work)

    def is_calm(self, monotonic: float) -> bool:
        return not self.busy and self._reader.is_calm(monotonic)

    def accept_result(self) -> tuple[DeviceReading, ...]:
        if isinstance(self.result, DriverError):
            raise self.result
        late = {device.uuid: device for device in self._late}
        self._late = ()
        self.known = tuple(with_work_of(late.get(device.uuid), device) for device in self.result)
        return self.known

    def keep_late_result(self) -> None:
        """Keep the work that a late answer shows: the next answer does not show it again."""
        self.busy = False
        if not isinstance(self.result, DriverError):
            late = {device.uuid: device for device in self._late}
            self._late = tuple(with_work_of(late.get(device.uuid), device) for device in self.result)

    def timed_out(self) -> tuple[DeviceReading, ...]:
        return tuple(device.without_data("timeout") for device in self.known)

    def run(self) -> None:
        name = "ledger"
        while True:
            work = self._requests.get()
            try:
                self.result = work()
                self._failing.succeeded(name)
            except DriverError as error:
                self.result = error
            except Exception as error:  # noqa: BLE001 a bug costs this GPU its data, and no other one
                self._failing.failed(name, error)
                self.result = tuple(device.without_data("failed") for device in self.known)
            self._finished.put(self)


class DeviceThreads:
    """The threads of all GPUs; used by one thread."""

    def __init__(self, readers: Sequence[DeviceReader], timeout: float) -> None:
        """Start a thread for each GPU, ``timeout`` a sample. Raises DriverError if the driver is gone."""
        self._readers = readers
        self._timeout = timeout
        self._finished: queue.SimpleQueue[_DeviceThread] = queue.SimpleQueue()
        self._threads = [_DeviceThread(reader, self._finished) for reader in readers]
        for thread in self._threads:
            thread.start()
            thread.open()
        for thread in self._wait(self._threads, OPEN_TIMEOUT):
            thread.accept_result()

    def read_lists_again(self) -> None:
        """Have the lists of all GPUs read at the next readings: something has happened to a holder."""
        for reader in self._readers:
            reader.read_list_again()

    def watch_cgroups(self, cgroups: tuple[str, ...]) -> None:
        """Have the limits of these cgroups read from now on; any thread may call this."""
        for reader in self._readers:
            reader.cgroups = cgroups

    def is_unchanged(self, now: float) -> bool:
        """Look at each GPU; tell whether all of them go on with what they have done and held for a while."""
        if not all(thread.is_calm(now) for thread in self._threads):
            return False
        for thread in self._threads:
            thread.request_look(now)
        answered = self._wait(self._threads, self._timeout)
        return all(thread in answered and thread.unchanged for thread in self._threads)

    def read(self, wall: float, begun: float) -> tuple[DeviceReading, ...]:
        """Read all GPUs. Raises DriverError if the driver as a whole does not work."""
        return self._read(self._threads, wall, begun)

    def read_again(
        self, devices: Sequence[DeviceReading], pids: Iterable[int], wall: float, begun: float
    ) -> tuple[DeviceReading, ...]:
        """Read GPUs that list one of these pids again. Raises DriverError if the driver does not work."""
        wanted = frozenset(pids)
        self.read_lists_again()
        again = [thread for thread in self._threads if wanted & listed_pids(thread.known) and not thread.busy]
        fresh = {device.uuid: device for device in self._read(again, wall, begun)}
        return tuple(with_work_of(device, fresh.get(device.uuid, device)) for device in devices)

    def _read(self, threads: Sequence[_DeviceThread], wall: float, begun: float) -> tuple[DeviceReading, ...]:
        """Request a reading from the threads that are free, and wait for their answers until the deadline.

        A thread that is still in a call of an earlier sample is not waited for. Its answer is then old and is
        dropped, except the work that it shows.
        """
        while not self._finished.empty():
            self._finished.get().keep_late_result()
        requested = [thread for thread in threads if not thread.busy]
        for thread in requested:
            thread.request_reading(wall, begun)
        answered = self._wait(requested, self._timeout)
        devices: list[DeviceReading] = []
        for thread in threads:
            devices.extend(thread.accept_result() if thread in answered else thread.timed_out())
        return tuple(devices)

    def _wait(self, threads: Iterable[_DeviceThread], seconds: float) -> set[_DeviceThread]:
        waiting = set(threads)
        answered: set[_DeviceThread] = set()
        deadline = time.monotonic() + seconds
        while waiting:
            try:
                thread = self._finished.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if thread in waiting:
                thread.busy = False
                waiting.remove(thread)
                answered.add(thread)
            else:
                thread.keep_late_result()
        return answered


def listed_pids(devices: Iterable[DeviceReading]) -> set[int]:
    return {entry.pid for device in devices for entry in device.processes or ()}


class XidWatch(Collector):
    """Wait for XID errors in a thread."""

    needs = ()

    def __init__(self, driver: Driver, interval: float) -> None:
        self._driver = driver
        self._pause = min(1.0, interval) / 2
        self._events: collections.deque[XidEvent] = collections.deque(maxlen=1000)
        self._given = 0
        self._works = True
        threading.Thread(target=self._watch, name="vramledger-xid", daemon=True).start()

    @property
    def pending(self) -> bool:
        """Whether there are errors that no sample has."""
        return len(self._events) > self._given

    def read(self, context: Context) -> Part:  # noqa: ARG002 as all are called
        """Return what has come since the last accepted read; ``context`` does not matter."""
        events = tuple(self._events)
        self._given = len(events)
        return {"events": events}

    def accept(self) -> None:
        for _ in range(self._given):
            self._events.popleft()
        self._given = 0

    @property
    def health(self) -> Health:
        """Whether every GPU that has XID events is watched; it takes no time."""
        return self._works, 0.0

    def _watch(self) -> None:
        while True:
            try:
                self._events.extend(self._driver.wait_events(EVENT_WAIT))
                self._works = self._driver.watches_events
            except DriverError as error:
                self._works = False
                if error.reason == "driver-lost":
                    return  # the device threads get this error too and report it
                time.sleep(self._pause)
            except Exception as error:  # noqa: BLE001 a bug must not end the watch
                self._works, self.failures = False, (error,)
                time.sleep(self._pause)
