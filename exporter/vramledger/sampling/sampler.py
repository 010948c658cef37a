"""Run the child process that reads NVML and /proc and writes each reading to stdout, as one line.

If the process as a whole hangs, the parent kills it. It keeps no history and judges nothing. It ends when
stdout is closed, when its parent dies, or when the driver as a whole does not work.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from importlib import import_module

from vramledger.config import ALWAYS_COLLECTED, SamplingConfig
from vramledger.errors import DriverError, VramledgerError
from vramledger.kubernetes.pods import PodApi, PodLabelReader
from vramledger.logs import configure, log
from vramledger.model.holder_facts import HOLDER_FACTS, HolderFact
from vramledger.model.reading import Reading, encode
from vramledger.readers.collector import Collector, Context
from vramledger.readers.hosts.driver_waits import DriverWaitSearch
from vramledger.readers.hosts.gpu_sleep import GpuSleep
from vramledger.readers.hosts.hidden_holders import HiddenSearch
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.managed_memory import ManagedMemoryReader
from vramledger.readers.hosts.system_memory import DeviceMemoryCgroups, SystemMemory
from vramledger.readers.hosts.thread_times import ThreadTimesReader
from vramledger.readers.nvml.driver import Driver, check_access
from vramledger.readers.owners.reader import OwnerReader
from vramledger.readers.schedulers.reader import SchedulerReader
from vramledger.sampling import malloc
from vramledger.sampling.capabilities import READ_CAPABILITIES
from vramledger.sampling.collectors import CollectorRunner, Slot
from vramledger.sampling.device_threads import DEVICE_COLLECTORS, DeviceThreads, XidWatch, failed_collectors
from vramledger.sampling.holder_watch import CpuTimes, FactsWatch, LimitWatch, RowReader, unread
from vramledger.sampling.privileges import drop_privileges, end_with_parent
from vramledger.sampling.protocol import DEVICES_CHANGED, DRIVER_FAILED, decode_config

RECOUNT_INTERVAL = 10.0
MAX_READS = 3


class Sampler:
    """Take samples of all devices and of the processes that they list."""

    def __init__(self, config: SamplingConfig, driver: Driver, host: Host) -> None:
        """Start a thread for each GPU. Raises DriverError if the driver is gone, or none may be used."""
        self._config = config
        self._driver = driver
        self._host = host
        readers = driver.readers(
            config.collectors,
            SystemMemory(host.root, config.rootfs),
            DeviceMemoryCgroups(host.root, config.rootfs),
            GpuSleep(host.root, config.rootfs),
        )
        self._devices = DeviceThreads(readers, config.timeout)
        check_access(readers)
        self._device_count = driver.device_count()
        self._last_recount = time.monotonic()
        self._namespace = host.pid_namespace()
        self._device_files = host.has_device_file()
        self._xids = XidWatch(driver, config.interval) if "xid" in config.collectors else None
        self._rows = Slot("process", lambda: RowReader(host))
        self._owners = Slot("owner", lambda: OwnerReader(host, config.rootfs))
        self._described: set[tuple[int, int]] = set()
        self._runner = CollectorRunner((self._rows, *self._make_slots()))
        self._context = Context()
        self._holders: frozenset[tuple[int, int, int]] = frozenset()
        self._gone: frozenset[int] = frozenset()
        self._sampled_at = float("-inf")
        self._looked_at: float | None = None

    def _make_slots(self) -> Iterator[Slot]:
        config, host, on = self._config, self._host, self._config.collectors
        yield Slot("facts", lambda: FactsWatch(host, lambda: self._owners.answered))
        yield self._owners
        yield Slot("limits", lambda: LimitWatch(self._devices.watch_cgroups))
        if "process" in on:
            yield Slot("managed", lambda: ManagedMemoryReader(host.root))
        yield Slot("cpu", lambda: CpuTimes(host))
        yield Slot("waits", lambda: DriverWaitSearch(host.root))
        if "threads" in on:
            yield Slot("threads", lambda: ThreadTimesReader(str(host.root), host.cpu_seconds))
        if "hidden" in on:
            yield Slot("hidden", lambda: HiddenSearch(host, frozenset({os.getpid(), os.getppid()})))
        if "reservations" in on:
            yield Slot("reservations", lambda: SchedulerReader(host, config.rootfs))
        pods = config.pods
        if pods is not None:
            yield Slot("pods", lambda: PodLabelReader(PodApi(pods, os.environ).read, pods.labels))
        xids = self._xids
        if xids is not None:
            yield Slot("xid", lambda: xids)
        for fact in HOLDER_FACTS:
            if fact.collector in on:
                yield Slot(fact.collector, lambda fact=fact: _make_collector(fact, host))  # type: ignore[misc]

    def sample(self) -> Reading:
        return self._sample(time.time(), time.monotonic())

    def sample_if_changed(self, longest: float) -> Reading | None:
        """Take a sample unless no GPU has changed, after ``longest`` in any case. Raises DriverError."""
        wall, now = time.time(), time.monotonic()
        eventful = self._xids is not None and self._xids.pending
        if now - self._sampled_at < longest and not eventful and self._devices.is_unchanged(now):
            self._looked_at = now
            return None
        return self._sample(wall, now)

    def _sample(self, wall: float, begun: float) -> Reading:
        self._sampled_at = begun
        looked_at, self._looked_at = self._looked_at, None
        context = Context(self._devices.read(wall, begun))
        devices_read = time.monotonic()
        self._run_collectors(context, wall, begun)
        end = time.monotonic()
        self._context = context
        if context.parts.get("events"):
            self._devices.read_lists_again()
        return Reading(
            time=wall, monotonic=begun, unchanged=looked_at, duration=end - begun, boot_id=self._host.boot_id,
            boot_time=self._host.boot_time, ticks=self._host.ticks, host_pid_namespace=self._namespace,
            driver_version=self._driver.driver_version, cuda_version=self._driver.cuda_version,
            devices=context.devices, device_files=self._device_files,
            collectors=self._health(context, end - devices_read), **context.parts,
        )  # fmt: skip

    def _health(self, context: Context, process_seconds: float) -> dict[str, tuple[bool, float]]:
        """Return how each collector did: those of the GPUs, and those that the runner runs."""
        on = self._config.collectors
        failed = set(failed_collectors(context.devices))
        slowest = max((device.duration for device in context.devices), default=0.0)
        health = {name: (name not in failed, slowest) for name in DEVICE_COLLECTORS & on}
        if "process" in on:
            complete = "process" not in failed and not {"denied", "unread"} & set(context.unseen.values())
            health["process"] = complete, process_seconds
        shown = (on | ALWAYS_COLLECTED.keys()) - {self._rows.name}
        for name, slot in self._runner.slots.items():
            if name in shown and slot.health is not None:
                health[name] = slot.health[0] and name not in failed, slot.health[1]
        return health

    def _run_collectors(self, context: Context, wall: float, begun: float) -> None:
        """Run all collectors, those that need the rows once it is certain who is gone.

        A process may end after NVML has listed it and before we read /proc. The driver leaks a pid only if
        NVML still lists it after /proc has not shown it. So devices that list a pid without a process for the
        first time are read once more, and then the rows too.
        """
        gone_before, reads, again = self._gone, 0, True
        gone = frozenset[int]()

        def are_sure(slot: Slot) -> bool:
            nonlocal gone, again
            if slot is not self._rows:
                return True
            if not slot.answered:
                context.add(unread(context.listed_pids))
            gone = frozenset(pid for pid, why in context.unseen.items() if why == "gone")
            again = slot.answered and not gone <= gone_before and reads < MAX_READS
            return not again

        while again:
            reads, again = reads + 1, False
            self._runner.read(context, are_sure)
            if again:
                gone_before |= gone
                context.devices = self._devices.read_again(context.devices, gone, wall, begun)
        if not self._rows.answered:
            context.add(unread(context.listed_pids))
            return
        self._gone = gone
        self._keep_owners(context)
        holders = frozenset((row.pid, row.start, row.ppid) for row in context.rows)
        if holders != self._holders:
            self._devices.read_lists_again()
        self._holders = holders

    def _keep_owners(self, context: Context) -> None:
        facts = {(each.pid, each.start): each for each in context.facts}
        if self._owners.answered:
            present = {(row.pid, row.start) for row in context.rows}
            self._described = (self._described | facts.keys()) & present
        elif facts:
            kept = tuple(each for identity, each in facts.items() if identity not in self._described)
            context.add({"facts": kept})

    def search_host(self) -> None:
        """Search for hidden holders and for waits in the driver between two samples, within the budgets."""
        self._runner.work_between(self._context)

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


def _make_collector(fact: HolderFact, host: Host) -> Collector:
    collector: Collector = import_module(f"vramledger.readers.{fact.module}").make_collector(host)
    return collector


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
