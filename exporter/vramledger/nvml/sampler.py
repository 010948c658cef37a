"""The sampler: the child process that reads NVML and /proc and writes one reading a line to stdout.

One thread a GPU, so that a call that hangs costs that GPU its data and nothing else; the parent kills
the whole process when even that fails. It keeps no history and judges nothing. It ends when stdout is
closed, when its parent dies, or when the driver as a whole is out of use.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from vramledger.config import SamplingConfig
from vramledger.errors import DriverError
from vramledger.hosts import FactsReader, HiddenSearch, Host
from vramledger.nvml.driver import DeviceReader, Driver
from vramledger.owners.reader import OwnerReader
from vramledger.readings import DeviceReading, ProcessFacts, ProcessRow, Reading, XidEvent, encode

DEVICES_CHANGED = 4
"""Exit status that asks for a fresh start at once: NVML lists devices only as of its initialisation."""

DRIVER_OUT = 3
"""Exit status after a failure of the driver as a whole, which the last line has reported."""

RECOUNT = 10.0
"""Seconds between two looks at the number of devices."""

FACTS_WAIT = 0.25
"""Seconds that a sample waits for facts of new processes; late ones come with the next sample."""

HIDDEN_BUDGET = 0.004
"""Seconds a sample spent looking for hidden holders: 0.4 % of a core at one sample a second."""


class _DeviceThread(threading.Thread):
    """Read one GPU on request; while a request is under way it is busy and gets no other."""

    def __init__(self, reader: DeviceReader, answers: queue.SimpleQueue[_DeviceThread]) -> None:
        super().__init__(name="vramledger-device", daemon=True)
        self.busy = False
        self.result: tuple[DeviceReading, ...] | DriverError = ()
        self.known: tuple[DeviceReading, ...] = (reader.identity,)
        self._reader = reader
        self._answers = answers
        self._requests: queue.SimpleQueue[tuple[float, float]] = queue.SimpleQueue()

    def ask(self, wall: float, monotonic: float) -> None:
        self.busy = True
        self._requests.put((wall, monotonic))

    def take(self) -> tuple[DeviceReading, ...]:
        """Return the newest result, or raise the driver's failure."""
        if isinstance(self.result, DriverError):
            raise self.result
        self.known = self.result
        return self.result

    def silent(self) -> tuple[DeviceReading, ...]:
        """Return the devices as known, without data: they have not answered in time."""
        return tuple(
            DeviceReading(
                index=device.index,
                uuid=device.uuid,
                name=device.name,
                pci_bus_id=device.pci_bus_id,
                minor=device.minor,
                parent=device.parent,
                mig_profile=device.mig_profile,
                gpu_instance=device.gpu_instance,
                compute_instance=device.compute_instance,
                divided=device.divided,
                error="timeout",
            )
            for device in self.known
        )

    def run(self) -> None:
        while True:
            wall, monotonic = self._requests.get()
            try:
                self.result = self._reader.read(wall, monotonic)
            except DriverError as error:
                self.result = error
            except Exception as error:  # noqa: BLE001 a defect must be reported, not end the thread unseen
                self.result = DriverError(
                    "internal", f"reading a device failed: {error!r}; please report this"
                )
            self._answers.put(self)


class Sampler:
    """Take samples of all devices and of the processes that they list."""

    def __init__(self, config: SamplingConfig, driver: Driver, host: Host) -> None:
        """Start a thread for each GPU of an open driver."""
        self._config = config
        self._driver = driver
        self._host = host
        self._answers: queue.SimpleQueue[_DeviceThread] = queue.SimpleQueue()
        self._threads = [_DeviceThread(reader, self._answers) for reader in driver.readers(config.collectors)]
        self._count = driver.device_count()
        self._counted = time.monotonic()
        self._facts = FactsReader(host)
        self._owners = OwnerReader(host, config.rootfs)
        self._known: dict[int, tuple[int, int]] = {}
        self._gone: frozenset[int] = frozenset()
        self._namespace = host.pid_namespace()
        self._hidden: HiddenSearch | None = None
        if "hidden" in config.collectors:
            self._hidden = HiddenSearch(host, frozenset({os.getpid(), os.getppid()}))
        self._hidden_took = 0.0
        self._events: collections.deque[XidEvent] = collections.deque(maxlen=1000)
        for thread in self._threads:
            thread.start()
        if "xid" in config.collectors:
            threading.Thread(target=self._watch_events, name="vramledger-xid", daemon=True).start()

    def _watch_events(self) -> None:
        while True:
            try:
                self._events.extend(self._driver.wait_events(1.0))
            except DriverError:
                return  # the device threads meet it too and report it

    def sample(self) -> Reading:
        """Take one sample.

        Raises:
            DriverError: the driver as a whole is out of use.
        """
        wall, begun = time.time(), time.monotonic()
        devices = self._read(self._threads, wall, begun)
        hosted = time.monotonic()
        rows, unseen = self._host.rows(_pids(devices))
        gone = frozenset(pid for pid, why in unseen.items() if why == "gone")
        if gone - self._gone:
            # The process may have ended between NVML's answer and /proc's. Only what NVML still lists
            # after /proc has said no is the driver's leak, so ask those devices once more.
            again = [thread for thread in self._threads if gone & _pids(thread.known) and not thread.busy]
            fresh = {device.uuid: device for device in self._read(again, wall, begun)}
            devices = tuple(fresh.get(device.uuid, device) for device in devices)
            rows, unseen = self._host.rows(_pids(devices))
            gone = frozenset(pid for pid, why in unseen.items() if why == "gone")
        self._gone = gone
        ended, renamed = self._owners.look(rows)
        facts = (*renamed, *self._learn(rows))
        end = time.monotonic()
        failed = any(device.failed or device.error for device in devices)
        collectors = {
            "ledger": (not failed, max((device.duration for device in devices), default=0.0)),
            "process": (not unseen, end - hosted),
        }
        if self._hidden is not None:
            collectors["hidden"] = (self._hidden.result is not None, self._hidden_took)
        events = tuple(self._events.popleft() for _ in range(len(self._events)))
        return Reading(
            time=wall,
            monotonic=begun,
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
            hidden=self._hidden.result if self._hidden is not None else None,
            events=events,
            collectors=collectors,
        )

    def rest(self) -> None:
        """Use the time between two samples: look for hidden holders, within the budget."""
        if self._hidden is None:
            return
        begun = time.monotonic()
        self._hidden.step(set(self._known), HIDDEN_BUDGET)
        self._hidden_took = time.monotonic() - begun

    def devices_changed(self) -> bool:
        """Tell, every :data:`RECOUNT` seconds, whether a GPU was plugged in or out."""
        if time.monotonic() - self._counted < RECOUNT:
            return False
        self._counted = time.monotonic()
        return self._driver.device_count() != self._count

    def _read(self, threads: Iterable[_DeviceThread], wall: float, begun: float) -> tuple[DeviceReading, ...]:
        """Ask the threads that are free and wait for their answers until the deadline.

        A thread that is still in a call of an earlier sample is not waited for; what it answers then
        is old and is dropped, and it is asked again in the next sample.
        """
        threads = list(threads)
        while not self._answers.empty():
            self._answers.get().busy = False
        waiting = {thread for thread in threads if not thread.busy}
        for thread in waiting:
            thread.ask(wall, begun)
        answered: set[_DeviceThread] = set()
        deadline = time.monotonic() + self._config.timeout
        while waiting:
            try:
                thread = self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            thread.busy = False
            if thread in waiting:
                waiting.remove(thread)
                answered.add(thread)
        devices: list[DeviceReading] = []
        for thread in threads:
            devices.extend(thread.take() if thread in answered else thread.silent())
        return tuple(devices)

    def _learn(self, rows: tuple[ProcessRow, ...]) -> tuple[ProcessFacts, ...]:
        """Return the facts of processes that are new or have a new parent, as far as they come in time."""
        known = {row.pid: (row.start, row.ppid) for row in rows}
        for row in rows:
            if self._known.get(row.pid) != known[row.pid]:
                self._facts.request(row)
        self._known = known
        learned = [facts for facts in self._facts.collect(FACTS_WAIT) if facts.pid in known]
        return tuple(facts for facts in self._owners.learn(learned, FACTS_WAIT) if facts.pid in known)


def _pids(devices: Iterable[DeviceReading]) -> set[int]:
    return {entry.pid for device in devices for entry in device.processes or ()}


def _die_with_parent() -> None:
    """Ask the kernel to kill us when the exporter dies: a hung call could not notice a closed pipe."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        sys.exit(0)


def _config(text: str) -> SamplingConfig:
    raw: Mapping[str, object] = json.loads(text)
    return SamplingConfig(
        interval=float(str(raw["interval"])),
        timeout=float(str(raw["timeout"])),
        procfs=Path(str(raw["procfs"])),
        rootfs=Path(str(raw["rootfs"])),
        collectors=frozenset(str(raw["collectors"]).split()),
    )


def arguments(config: SamplingConfig) -> str:
    """Write the sampler's only argument, which :func:`main` reads."""
    return json.dumps(
        {
            "interval": config.interval,
            "timeout": config.timeout,
            "procfs": str(config.procfs),
            "rootfs": str(config.rootfs),
            "collectors": " ".join(sorted(config.collectors)),
        }
    )


def _send(reading: Reading) -> None:
    data = memoryview(encode(reading))
    while data:
        data = data[os.write(1, data) :]


def _sample_forever(config: SamplingConfig) -> int:
    host = Host(config.procfs, config.rootfs)
    try:
        driver = Driver.open()
        sampler = Sampler(config, driver, host)
        due = time.monotonic()
        while True:
            _send(sampler.sample())
            sampler.rest()
            if sampler.devices_changed():
                return DEVICES_CHANGED
            due = max(due + config.interval, time.monotonic())  # late samples are skipped, never bunched
            time.sleep(max(0.0, due - time.monotonic()))
    except DriverError as error:
        _send(
            Reading(
                time=time.time(),
                monotonic=time.monotonic(),
                boot_id=host.boot_id,
                host_pid_namespace=host.pid_namespace(),
                failure=(error.reason, str(error)),
            )
        )
        return DRIVER_OUT


def main() -> int:
    """Run until told otherwise; the exit status says why it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is the exporter's to handle
    _die_with_parent()
    sys.setswitchinterval(0.0005)  # device threads hold the GIL for microseconds; 5 ms would queue them up
    try:
        status = _sample_forever(_config(sys.argv[1]))
    except BrokenPipeError:
        status = 0
    sys.stderr.flush()
    os._exit(status)  # a thread that hangs in the driver must not keep the process


if __name__ == "__main__":
    main()
