"""Run the child process that reads NVML and /proc and writes each reading to stdout, as one line.

Each GPU has a thread, so that only one GPU's data is missing when a call hangs. If the process as a whole
hangs, the parent kills it. It keeps no history and judges nothing. It ends when stdout is closed, when its
parent dies, or when the driver as a whole does not work.
"""

from __future__ import annotations

import collections
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from vramledger.config import SamplingConfig
from vramledger.errors import DriverError, VramledgerError
from vramledger.logs import configure, log
from vramledger.model.counted_activity import mean_activity
from vramledger.model.reading import (
    DeviceReading,
    KvCache,
    ManagedMappings,
    PodLabels,
    ProcessFacts,
    ProcessRow,
    Reading,
    XidEvent,
)
from vramledger.model.reading_json import encode
from vramledger.readers.hosts.dmem import DeviceMemoryCgroups, chain_of
from vramledger.readers.hosts.driver_waits import DriverWaitSearch
from vramledger.readers.hosts.facts_reader import FactsReader
from vramledger.readers.hosts.hidden_holders import HiddenSearch
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.libraries import names_framework
from vramledger.readers.hosts.managed_memory import ManagedMemoryReader
from vramledger.readers.hosts.system_memory import SystemMemory
from vramledger.readers.nvml.device_reader import DeviceReader
from vramledger.readers.nvml.driver import Driver, check_access
from vramledger.readers.nvml.hardware import HARDWARE_METRICS
from vramledger.readers.owners.cgroups import unified_path
from vramledger.readers.owners.pod_api import PodApi
from vramledger.readers.owners.pod_labels import HolderPods, PodLabelReader
from vramledger.readers.owners.reader import OwnerReader
from vramledger.readers.schedulers.reader import SchedulerReader
from vramledger.readers.vllm.reader import KvCacheReader
from vramledger.sampling import malloc
from vramledger.sampling.capabilities import READ_CAPABILITIES
from vramledger.sampling.ending import end_with_parent
from vramledger.sampling.privileges import drop_privileges
from vramledger.sampling.protocol import DEVICES_CHANGED, DRIVER_FAILED, decode_config

RECOUNT_INTERVAL = 10.0
"""Seconds between two queries of the number of devices."""

OPEN_TIMEOUT = 5.0
"""Seconds for which the start waits for GPUs: without the persistence daemon a first query wakes each GPU
for seconds. A GPU that hangs there must not delay the data of the others."""

MAX_READS = 3
"""The maximum number of readings of a device in one sample, if its processes end between the reads."""

FACTS_TIMEOUT = 0.25
"""Seconds for which a sample waits for facts of new processes; late ones come with the next sample."""

MANAGED_TIMEOUT = 0.05
"""Seconds for which a sample waits for mappings; a read takes below a millisecond, and a late one comes with
the next sample."""

EVENT_WAIT = 5.0
"""Seconds for which the driver is asked to wait for an XID error; one that comes ends the wait at once."""

REFRESH_DELAYS = (30.0, 300.0)
"""Seconds after its first facts at which a holder is read again: NVML lists it from its first context on, and
we would miss what it loads later. It is read the second time only if no framework was found."""

REFRESH_BATCH, REFRESH_SPACING, REFRESH_SPREAD = 32, 1.0, 20.0
"""Holders that were first seen together are read again in groups: the size of a group, the pause between two
groups, and the longest delay. The facts of 512 in one sample made the sampler grow by 0.9 MiB."""

HIDDEN_BUDGET = 0.004
"""Seconds of a sample that are spent on the search for hidden holders: 0.4 % of a core at one sample a
second."""


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
        """Return the newest result, or raise the driver's failure."""
        if isinstance(self.result, DriverError):
            raise self.result
        late = {device.uuid: device for device in self._late}
        self._late = ()
        self.known = tuple(_with_work_of(late.get(device.uuid), device) for device in self.result)
        return self.known

    def keep_late_result(self) -> None:
        """Keep the work that a late answer shows: the next answer does not show it again."""
        self.busy = False
        if not isinstance(self.result, DriverError):
            late = {device.uuid: device for device in self._late}
            self._late = tuple(_with_work_of(late.get(device.uuid), device) for device in self.result)

    def timed_out(self) -> tuple[DeviceReading, ...]:
        """Return the devices as known, without data, because they have not answered in time."""
        return tuple(device.without_data("timeout") for device in self.known)

    def run(self) -> None:
        while True:
            work = self._requests.get()
            try:
                self.result = work()
            except DriverError as error:
                self.result = error
            except Exception as error:  # noqa: BLE001 a bug must be reported and not hidden
                self.result = DriverError(
                    "internal", f"reading a device failed: {error!r}; please report this"
                )
            self._finished.put(self)


class Sampler:
    """Take samples of all devices and of the processes that they list."""

    def __init__(self, config: SamplingConfig, driver: Driver, host: Host) -> None:
        """Start a thread for each GPU of an open driver.

        Raises:
            DriverError: the driver is gone again, or we may use none of its GPUs.
        """
        self._config = config
        self._driver = driver
        self._host = host
        self._finished: queue.SimpleQueue[_DeviceThread] = queue.SimpleQueue()
        readers = driver.readers(
            config.collectors,
            SystemMemory(host.root, config.rootfs),
            DeviceMemoryCgroups(host.root, config.rootfs),
        )
        self._readers = readers
        self._chains: dict[tuple[int, int], tuple[str, ...]] = {}
        self._cpu: dict[tuple[int, int], float] = {}
        self._threads = [_DeviceThread(reader, self._finished) for reader in readers]
        self._device_count = driver.device_count()
        self._last_recount = time.monotonic()
        self._facts = FactsReader(host)
        self._owners = OwnerReader(host, config.rootfs)
        self._known: dict[int, tuple[int, int]] = {}
        self._refreshes: dict[tuple[int, int], list[float]] = {}
        self._gone: frozenset[int] = frozenset()
        self._namespace = host.pid_namespace()
        self._hidden: HiddenSearch | None = None
        if "hidden" in config.collectors:
            self._hidden = HiddenSearch(host, frozenset({os.getpid(), os.getppid()}))
        self._hidden_seconds = 0.0
        self._waits = DriverWaitSearch(host.root)
        self._managed = ManagedMemoryReader(host.root)
        self._rows: tuple[ProcessRow, ...] = ()
        self._bystanders: frozenset[tuple[int, int]] = frozenset()
        self._schedulers: SchedulerReader | None = None
        if "reservations" in config.collectors:
            self._schedulers = SchedulerReader(host, config.rootfs)
        self._pod_labels: PodLabelReader | None = None
        if config.pods is not None:
            self._pod_labels = PodLabelReader(PodApi(config.pods, os.environ).read, config.pods.labels)
        self._pods = HolderPods()
        self._kv_caches = KvCacheReader(str(host.root)) if "vllm" in config.collectors else None
        self._xid = True
        self._events: collections.deque[XidEvent] = collections.deque(maxlen=1000)
        self._sampled_at = float("-inf")
        self._looked_at: float | None = None
        for thread in self._threads:
            thread.start()
            thread.open()
        for thread in self._wait_for_threads(self._threads, OPEN_TIMEOUT):
            thread.accept_result()
        check_access(readers)
        self._device_files = host.has_device_file()
        if "xid" in config.collectors:
            threading.Thread(target=self._watch_events, name="vramledger-xid", daemon=True).start()

    def _watch_events(self) -> None:
        pause = min(1.0, self._config.interval) / 2
        while True:
            try:
                self._events.extend(self._driver.wait_events(EVENT_WAIT))
                self._xid = self._driver.watches_events
            except DriverError as error:
                self._xid = False
                if error.reason == "driver-lost":
                    return  # the device threads get this error too and report it
                time.sleep(pause)

    def sample(self) -> Reading:
        """Take one sample.

        Raises:
            DriverError: the driver as a whole does not work.
        """
        return self._sample(time.time(), time.monotonic())

    def sample_if_changed(self, longest: float) -> Reading | None:
        """Take a sample, unless a look at each GPU shows that it would say what the last one said.

        Args:
            longest: seconds after the last sample from which one is taken in any case.

        Raises:
            DriverError: the driver as a whole does not work.
        """
        wall, now = time.time(), time.monotonic()
        if now - self._sampled_at < longest and self._is_unchanged(now):
            self._looked_at = now
            return None
        return self._sample(wall, now)

    def _is_unchanged(self, now: float) -> bool:
        """Look at each GPU; tell whether all of them go on with what they have done and held for a while."""
        if self._events or not all(thread.is_calm(now) for thread in self._threads):
            return False
        for thread in self._threads:
            thread.request_look(now)
        answered = self._wait_for_threads(self._threads, self._config.timeout)
        return all(thread in answered and thread.unchanged for thread in self._threads)

    def _sample(self, wall: float, begun: float) -> Reading:
        self._sampled_at = begun
        looked_at, self._looked_at = self._looked_at, None
        devices = self._read_devices(self._threads, wall, begun)
        devices_read = time.monotonic()
        devices, rows, unseen = self._read_processes(devices, wall, begun)
        ended, renamed = self._owners.check_owners(rows)
        facts = (*renamed, *self._collect_facts(rows))
        self._watch_limits(rows, facts)
        managed: tuple[ManagedMappings, ...] = ()
        if "process" in self._config.collectors:
            managed = self._managed.update(devices, rows, MANAGED_TIMEOUT)
        end = time.monotonic()
        failed = set(failed_collectors(devices))
        slowest = max((device.duration for device in devices), default=0.0)
        collectors = {
            name: (name not in failed, slowest) for name in _DEVICE_COLLECTORS & self._config.collectors
        }
        if "process" in self._config.collectors:
            complete = "process" not in failed and "denied" not in unseen.values()
            collectors["process"] = (complete, end - devices_read)
        if self._hidden is not None:
            collectors["hidden"] = (not self._hidden.unreadable, self._hidden_seconds)
        if "xid" in self._config.collectors:
            collectors["xid"] = (self._xid, 0.0)
        schedulers = self._schedulers.read_schedulers() if self._schedulers is not None else ()
        pods: tuple[PodLabels, ...] = ()
        if self._pod_labels is not None:
            pods = self._pod_labels.update(self._pods.update(rows, unseen, facts, schedulers))
        if self._pod_labels is not None and self._pod_labels.health is not None:
            collectors["pods"] = self._pod_labels.health
        kv_caches: tuple[KvCache, ...] = ()
        if self._kv_caches is not None:
            kv_caches = self._kv_caches.update(rows)
            if self._kv_caches.seconds is not None:
                collectors["vllm"] = (self._kv_caches.answers, self._kv_caches.seconds)
        events = tuple(self._events.popleft() for _ in range(len(self._events)))
        if events:
            self._read_lists_again()
        return Reading(
            time=wall,
            monotonic=begun,
            unchanged=looked_at,
            duration=end - begun,
            boot_id=self._host.boot_id,
            boot_time=self._host.boot_time,
            ticks=self._host.ticks,
            host_pid_namespace=self._namespace,
            driver_version=self._driver.driver_version,
            cuda_version=self._driver.cuda_version,
            devices=devices,
            rows=rows,
            unseen=unseen,
            ended=ended,
            facts=facts,
            device_files=self._device_files,
            waits=self._waits.result,
            managed=managed,
            cpu_taken=self._read_cpu_seconds(devices, rows),
            hidden=self._hidden.result if self._hidden is not None else None,
            hidden_unreadable=self._hidden_unreadable(),
            schedulers=schedulers,
            schedulers_read=self._schedulers.read_at if self._schedulers is not None else None,
            pods=pods,
            kv_caches=kv_caches,
            events=events,
            collectors=collectors,
        )

    def _watch_limits(self, rows: Iterable[ProcessRow], facts: Iterable[ProcessFacts]) -> None:
        """Have the limits of the holders' cgroups, and of those above them, read from now on."""
        for each in facts:
            self._chains[each.pid, each.start] = chain_of(unified_path(each.cgroup or ()) or "")
        present = {(row.pid, row.start) for row in rows}
        self._chains = {identity: chain for identity, chain in self._chains.items() if identity in present}
        watched = tuple(dict.fromkeys(path for chain in self._chains.values() for path in chain))
        for reader in self._readers:
            reader.cgroups = watched

    def _read_cpu_seconds(
        self, devices: tuple[DeviceReading, ...], rows: Iterable[ProcessRow]
    ) -> tuple[tuple[int, float], ...]:
        """Return what CPU time holders took that may be taken for idle because of another one's work.

        The sum since their start has digits that change each second; stored, they would take more than all
        else.
        """
        lists = [each.processes for each in devices if each.processes is not None and len(each.processes) > 1]
        pids = {entry.pid for entries in lists for entry in entries}
        read = (((row.pid, row.start), self._host.cpu_seconds(row.pid)) for row in rows if row.pid in pids)
        before, self._cpu = self._cpu, {each: seconds for each, seconds in read if seconds is not None}
        return tuple(
            (each[0], round(max(seconds - before[each], 0.0), 4))
            for each, seconds in sorted(self._cpu.items())
            if each in before
        )

    def _read_processes(
        self, devices: tuple[DeviceReading, ...], wall: float, begun: float
    ) -> tuple[tuple[DeviceReading, ...], tuple[ProcessRow, ...], dict[int, str]]:
        """Return the devices, the rows of their processes, and the pids without a row.

        A process may end after NVML has listed it and before we read /proc. The driver leaks a pid only if
        NVML still lists it after /proc has not shown it. So devices that list a pid without a process for the
        first time are read once more.
        """
        gone_before = self._gone
        for _ in range(MAX_READS):
            rows, unseen = self._host.rows(_listed_pids(devices))
            gone = frozenset(pid for pid, why in unseen.items() if why == "gone")
            if gone <= gone_before:
                break
            gone_before |= gone
            self._read_lists_again()
            again = [
                thread for thread in self._threads if gone & _listed_pids(thread.known) and not thread.busy
            ]
            fresh = {device.uuid: device for device in self._read_devices(again, wall, begun)}
            devices = tuple(_with_work_of(device, fresh.get(device.uuid, device)) for device in devices)
        self._gone = gone
        return devices, rows, unseen

    def _read_lists_again(self) -> None:
        """Have the lists of all GPUs read at the next readings: something has happened to a holder."""
        for reader in self._readers:
            reader.read_list_again()

    def _hidden_unreadable(self) -> int | None:
        """Return how many processes the search for hidden holders could not look into, once known."""
        return self._hidden.unreadable if self._hidden is not None and self._hidden.complete else None

    def search_host(self) -> None:
        """Search for hidden holders and for waits in the driver between two samples, within the budgets."""
        self._waits.search(self._rows)
        if self._hidden is None:
            return
        begun = time.monotonic()
        self._hidden.search(set(self._known), HIDDEN_BUDGET)
        self._hidden_seconds = time.monotonic() - begun

    def devices_changed(self) -> bool:
        """Tell, every :data:`RECOUNT_INTERVAL` seconds, whether a GPU was added or removed."""
        if time.monotonic() - self._last_recount < RECOUNT_INTERVAL:
            return False
        self._last_recount = time.monotonic()
        try:
            return self._driver.device_count() != self._device_count
        except DriverError as error:
            if error.reason == "driver-lost":
                raise
            return False  # one failed query says nothing about the number

    def _read_devices(
        self, threads: Iterable[_DeviceThread], wall: float, begun: float
    ) -> tuple[DeviceReading, ...]:
        """Request a reading from the threads that are free, and wait for their answers until the deadline.

        A thread that is still in a call of an earlier sample is not waited for. Its answer is then old and is
        dropped, except the work that it shows. The thread gets a new request in the next sample.
        """
        threads = list(threads)
        while not self._finished.empty():
            self._finished.get().keep_late_result()
        requested = [thread for thread in threads if not thread.busy]
        for thread in requested:
            thread.request_reading(wall, begun)
        answered = self._wait_for_threads(requested, self._config.timeout)
        devices: list[DeviceReading] = []
        for thread in threads:
            devices.extend(thread.accept_result() if thread in answered else thread.timed_out())
        return tuple(devices)

    def _wait_for_threads(self, threads: Iterable[_DeviceThread], seconds: float) -> set[_DeviceThread]:
        """Wait for the answers of these threads, and return those that came in time."""
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

    def _collect_facts(self, rows: tuple[ProcessRow, ...]) -> tuple[ProcessFacts, ...]:
        """Return the facts of processes that are new or have a new parent, as far as they arrive in time."""
        known = {row.pid: (row.start, row.ppid) for row in rows}
        for row in rows:
            # The pid of a dead holder may be reused by a program that then uses a GPU too.
            bystander = (row.pid, row.start) in self._bystanders
            if bystander or self._known.get(row.pid) != known[row.pid]:
                self._facts.request(row)
        if known != self._known:
            self._read_lists_again()
        self._known = known
        self._rows = rows
        self._request_refreshes(rows)
        read_facts = [facts for facts in self._facts.collect(FACTS_TIMEOUT) if facts.pid in known]
        found = tuple(
            facts for facts in self._owners.add_owners(read_facts, FACTS_TIMEOUT) if facts.pid in known
        )
        read_again = {(facts.pid, facts.start): facts.uses_gpu is False for facts in found}
        self._bystanders = frozenset(
            identity
            for identity in {*self._bystanders, *read_again}
            if read_again.get(identity, True) and known.get(identity[0], (None,))[0] == identity[1]
        )
        now, today = time.monotonic(), time.time()
        for number, facts in enumerate(found):
            identity = (facts.pid, facts.start)
            begins = now + min(number // REFRESH_BATCH * REFRESH_SPACING, REFRESH_SPREAD)
            refreshes = self._refreshes.setdefault(
                identity, [begins + delay for delay in reversed(REFRESH_DELAYS)]
            )
            age = today - self._host.boot_time - facts.start / self._host.ticks
            if age >= REFRESH_DELAYS[0] and names_framework(facts.libraries):
                refreshes.clear()  # the holder has had time to load what it uses
        return found

    def _request_refreshes(self, rows: tuple[ProcessRow, ...]) -> None:
        """Request the facts again of processes whose time has come, and forget those no longer listed."""
        now = time.monotonic()
        listed: dict[tuple[int, int], list[float]] = {}
        for row in rows:
            refreshes = self._refreshes.get((row.pid, row.start))
            if refreshes is not None:
                listed[row.pid, row.start] = refreshes
                if refreshes and refreshes[-1] <= now:
                    refreshes.pop()
                    self._facts.request(row)
        self._refreshes = listed


_DEVICE_COLLECTORS = frozenset({"ledger", "hardware", "energy", "pcie"})
"""The device threads read the data of these collectors in one call, so the collectors share its duration."""

_COLLECTOR_BY_QUERY = {
    **{question.key: question.collector for question in HARDWARE_METRICS},
    "utilization": "hardware",
    "process_utilization": "process",
    "activity": "process",
}


def failed_collectors(devices: Iterable[DeviceReading]) -> Iterator[str]:
    """Yield the collectors that lack an answer.

    A query that belongs to no other collector is the ledger's.
    """
    for device in devices:
        if device.error is not None:
            yield "ledger"
        for name in device.failed:
            yield _COLLECTOR_BY_QUERY.get(name, "ledger")


def _with_work_of(old: DeviceReading | None, new: DeviceReading) -> DeviceReading:
    """Return a device's newer reading, with the work that only its earlier reading shows."""
    if old is None or old is new or new.error is not None:
        return new
    rows, activity = new.process_utilization, new.activity
    if old.process_utilization:
        rows = (*old.process_utilization, *(rows or ()))
    if activity and old.activity and activity != old.activity:
        activity = mean_activity(old.activity, activity)
    return replace(new, process_utilization=rows, activity=activity)


def _listed_pids(devices: Iterable[DeviceReading]) -> set[int]:
    return {entry.pid for device in devices for entry in device.processes or ()}


def _write_reading(reading: Reading) -> None:
    data = memoryview(encode(reading))
    while data:
        data = data[os.write(1, data) :]


def _sample_forever(config: SamplingConfig) -> int:
    try:
        host = Host(config.procfs, config.rootfs)
        # may start nvidia-modprobe, which makes the device files and needs its setuid bit
        driver = Driver.open()
        drop_privileges(use=READ_CAPABILITIES)
        sampler = Sampler(config, driver, host)
        malloc.freeze_objects()
        due = time.monotonic()
        last_freed = float("-inf")
        # Half an interval less: a sample is due at this turn, not at the next, if this one is a little early.
        longest = config.calm_interval - config.interval / 2
        while True:
            reading = sampler.sample_if_changed(longest)
            if reading is not None:
                _write_reading(reading)
            sampler.search_host()
            if (
                time.monotonic() - last_freed > malloc.FREE_INTERVAL
            ):  # repeated after the first sample, because the first facts allocate many new objects
                last_freed = time.monotonic()
                malloc.free_unused()
            if sampler.devices_changed():
                return DEVICES_CHANGED
            # a sample that is late is skipped, so that two are never taken one right after the other
            due = max(due + config.interval, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))
    except DriverError as error:
        _write_reading(_failed_reading(error.reason, str(error), host))
    except VramledgerError as error:  # /proc was there when the exporter started
        _write_reading(_failed_reading("internal", str(error)))
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 a bug is counted and reported in one line, as any other failure
        log.debug("Traceback", exc_info=error)
        _write_reading(_failed_reading("internal", f"the sampler failed: {error!r}; please report this"))
    return DRIVER_FAILED


def _failed_reading(reason: str, message: str, host: Host | None = None) -> Reading:
    return Reading(
        time=time.time(),
        monotonic=time.monotonic(),
        boot_id="" if host is None else host.boot_id,
        host_pid_namespace=None if host is None else host.pid_namespace(),
        failure=(reason, message),
    )


def main() -> int:
    """Run until the exporter or an error ends it; the exit status says why it ended."""
    malloc.use_one_arena()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is handled by the exporter
    end_with_parent()
    configure(*sys.argv[2:4])
    # device threads hold the GIL for microseconds; the default of 5 ms would make them wait
    sys.setswitchinterval(0.0005)
    try:
        status = _sample_forever(decode_config(sys.argv[1]))
    except BrokenPipeError:
        status = 0
    sys.stderr.flush()
    os._exit(status)  # a thread that hangs in the driver must not keep the process alive


if __name__ == "__main__":
    main()
