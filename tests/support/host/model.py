"""A simulated host with GPUs: what NVML and /proc report at any moment, as a real ``Reading``.

Programs (``programs.py``) say what they take and how they work; this module adds what a real host adds, as
measured on H200s: the driver's reserve, bytes of nobody, missed samples, pids without a process.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Literal, NamedTuple, Protocol
from zlib import crc32

from msgspec.structs import replace

from tests.support.host.agents import Around, Failures, Figures, report_of
from vramledger.model.agent_report import REASONS, Agent, AgentSocket
from vramledger.model.device_signs import beyond_contexts, uncharged_bytes
from vramledger.model.holder_facts import Ties
from vramledger.model.reading import (
    DeviceReading,
    DriverWait,
    HardwareValue,
    HiddenHolder,
    ManagedMappings,
    MemoryReading,
    Owner,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Rank,
    Reading,
    Scheduler,
    ThreadTimes,
    XidEvent,
)
from vramledger.readers.hosts.thread_times import LOOK_INTERVAL

MIB = 2**20
GIB = 2**30
EPOCH = 7_200
"""Unix time of a simulation's beginning: promtool's tests begin at 0, and no time may be negative."""

BOOT = 600
TICKS = 100
UID = 1000
RESERVED = 615 * MIB
CONTEXT = 518 * MIB
"""Bytes of an empty context on an H200."""

LIBRARIES = {
    "torch": ("libtorch_cuda", "libcuda"),
    "vllm": ("vllm", "libtorch_cuda", "libcuda"),
    "tensorflow": ("libtensorflow", "libcuda"),
    "jax": ("xla_cuda_plugin", "libjax_common", "libcuda"),
    "cuda": ("libcuda",),
}
"""The libraries that a program of a framework has mapped, by the sampler's names."""


class Use(NamedTuple):
    """What a program does with one device at one moment.

    ``memory`` is bytes as NVML would list them, 0 before its context exists. ``work`` is the share of time
    that its kernels run, ``seen`` the share of seconds with work that leave a utilisation sample.
    ``pools`` is what its agent would report of its frameworks. ``uncharged`` are bytes that it has and that
    NVML charges to nobody, ``mapped`` what it maps of ``/dev/nvidia-uvm``, None where that is not readable.
    ``spins`` is the share of time in which a kernel of it runs that computes and moves nothing.
    """

    memory: int
    work: float = 0.0
    seen: float = 1.0
    pools: Mapping[str, Figures] = {}
    uncharged: int = 0
    mapped: int | None = 0
    spins: float = 0.0


class Program(Protocol):
    """How a program uses a device, called in the order of time."""

    def use(self, age: float) -> Use:
        """Return what it does ``age`` seconds after its start."""


Fate = Literal[
    "stopped",  # it gets SIGSTOP
    "zombie",  # it exits, and is not reaped
    "headless",  # its main thread ends while others live on
    "stuck",  # a thread of it sleeps in the driver for ever
    "dead",  # it is gone, and the driver lists it still
    "orphaned",  # the program that started it ends
    "unowned",  # its owner ends: container, pod or job
    "silent",  # its agent says nothing any more
]

_SILENCING: tuple[Fate, ...] = ("silent", "stopped", "stuck")
_TOLD: tuple[Fate, ...] = ("stuck", "orphaned")
_HALTING: tuple[Fate, ...] = ("stopped", "zombie", "stuck", "dead")

FaultKind = Literal[
    "driver lost",  # NVML as a whole does not answer
    "device lost",  # one device does not answer; ``name`` is why
    "device gone",  # one device is not even listed
    "xid",  # ``gpu`` reports the error ``number`` at ``since``
    "hidden holder",  # the process ``number`` has the first device open, and NVML does not list it
    "collector",  # the collector ``name`` fails
    "clock",  # the clock is ``number`` seconds ahead
    "blind",  # the exporter does not share the host's PID namespace
    "released",  # the exporter has released the GPUs on purpose
    "unreadable",  # the search for hidden holders may not look into ``number`` processes
    "refused",  # the agents' socket refuses ``number`` messages a second, which are too many
]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of the host, or of the way it is observed, in a span of time."""

    kind: FaultKind  # what is wrong
    since: float = 0.0  # seconds after :data:`EPOCH` at which it begins
    until: float = inf  # when it is over
    gpu: int = 0  # the position of the device that it is about
    number: float = 0  # as the kind says
    name: str = "lost"  # as the kind says


@dataclass(slots=True, eq=False)
class Process:
    """One process of the host; times are seconds after :data:`EPOCH`."""

    pid: int  # in the host's namespace
    places: Mapping[int, Program]  # the program by the position of the device that it uses
    begin: float = 0.0  # when it starts
    end: float = inf  # when it is gone, and its memory with it
    user: str = "ada"  # who runs it
    command: str = "train.py"  # the program's name
    framework: str = "torch"  # a key of :data:`LIBRARIES`; of another one the maps cannot be read
    owner: Owner | None = None  # who answers for it, besides the user
    settings: tuple[tuple[str, str], ...] = ()  # environment variables that control GPU memory
    signs: tuple[str, ...] = ()  # what says that it is somebody's worker
    # which of NVML's lists name it; with ``M`` the driver counts its work for the MPS server
    kinds: str = "C"
    agent: bool = False  # it runs our agent
    cgroup: str = ""
    rank: Rank | None = None  # which rank of a distributed job it is
    starter: ParentFacts | None = None  # who started it; a launcher of its own unless told otherwise
    group: int | None = None  # its process group and session; the launcher's unless told otherwise
    fates: dict[Fate, float] = field(default_factory=dict)  # what happens to it, and when

    @property
    def start(self) -> int:
        """Its start in ticks since boot, which identifies it together with the pid."""
        return round((EPOCH - BOOT + self.begin) * TICKS)

    def met(self, fate: Fate, now: float) -> bool:
        return now >= self.fates.get(fate, inf)

    def listed(self, now: float) -> bool:
        """Tell whether it exists, or the driver still lists it."""
        return self.begin <= now < self.end

    def parent(self, now: float) -> ParentFacts:
        if self.met("orphaned", now):
            return ParentFacts(1, 1, "systemd", "systemd", init=True)
        return self.starter or ParentFacts(self.pid - 1, self.start - 50, "python", "launch.py", init=False)

    def facts(self, now: float) -> ProcessFacts:
        """Return the facts that are read once for it."""
        return ProcessFacts(
            pid=self.pid, start=self.start, uid=UID, user=self.user, comm=self.command[:15],
            command=self.command, signs=self.signs, cgroup=(f"0::{self.cgroup}",) if self.cgroup else None,
            owner=self.owner or Owner("user", self.user), libraries=LIBRARIES.get(self.framework),
            settings=self.settings, parent=self.parent(now), leader_alive=not self.met("orphaned", now),
            uses_gpu=bool(self.places), rank=self.rank,
        )  # fmt: skip

    def row(self, now: float) -> ProcessRow:
        state, threads = "S", 12
        if self.met("zombie", now):
            state, threads = "Z", 1
        elif self.met("headless", now):
            state, threads = "Z", 4
        elif self.met("stopped", now):
            state = "T"
        elif self.met("stuck", now):
            state = "D"
        parent, group = self.parent(now).pid, self.pid - 1 if self.group is None else self.group
        return ProcessRow(self.pid, self.start, state, parent, group, group, 0, threads)


QUIET_CPU = 0.0006
"""CPU seconds that a program with an idle context takes each second, as measured on an H200."""

_QUIET_CPUS = (0.0005, 0.0005, 0.0005, 0.0006, 0.0006, 0.0007)
"""What it took in single seconds there."""


HELPER_WAKE_CPU = 0.000075
"""CPU seconds of each wake of a notebook's helper threads, as measured beside an H100."""


@dataclass(slots=True, eq=False)
class Gpu:
    """One device: a GPU, a MIG instance, or the GPU that instances divide."""

    index: int = 0  # NVML's number
    total: int = 143_771 * MIB  # bytes
    reserved: int = RESERVED  # bytes that the driver keeps
    unowned: Callable[[float], int] = lambda _: 14 * MIB  # bytes that no process holds, by time
    # (from when, which one) of the cards under its index; made of the index where there is none
    uuids: tuple[tuple[float, str], ...] = ()
    parent: str | None = None  # UUID of the GPU that this instance is a part of
    profile: str | None = None  # of an instance
    instance: int | None = None  # its id on its GPU
    divided: bool = False  # it is in MIG mode
    # what the hardware says of itself, by time
    sensors: Callable[[float], Mapping[str, HardwareValue]] = lambda _: {"device_temperature_celsius": 41.0}
    counters: bool = True  # it has GPM's counters, as GPUs since Hopper have
    # fields of the device's reading as the driver gives them, whatever the processes do
    says: dict[str, Any] = field(default_factory=dict)
    # the product, as NVML names it; of an instance that of its GPU with ``MIG`` and the profile
    name: str = "NVIDIA H200"

    def uuid(self, now: float) -> str:
        """Return the identity of the card in this place at a moment."""
        known = [uuid for since, uuid in self.uuids if since <= now]
        return known[-1] if known else f"GPU-{self.index:08d}-0000-0000-0000-000000000000"


@dataclass(slots=True)
class Host:
    """A host, its devices and processes; each may be changed between two readings."""

    gpus: Sequence[Gpu]  # the devices, instances behind the GPU that they divide
    processes: Sequence[Process]  # who has been, is and will be
    random: Random  # what chance decides: which utilisation samples miss work
    interval: float = 1.0  # seconds between two readings
    faults: Sequence[Fault] = ()  # what is wrong, and when
    schedulers: tuple[Scheduler, ...] = ()  # what they have reserved
    threads: bool = False  # whether the exporter looks at the holders' threads
    _uses: dict[tuple[Process, int], Use] = field(default_factory=dict)
    _failures: Failures = field(default_factory=Failures)
    _told: dict[tuple[int, int], int] = field(default_factory=dict)
    _ran_last: dict[int, int] = field(default_factory=dict)
    _ran: set[Process] = field(default_factory=set)

    def restart(self) -> None:
        """Start again, like the sampler of a restarted exporter: all facts are sent again."""
        self._told.clear()

    def present(self, kind: FaultKind, now: float) -> Iterator[Fault]:
        return (fault for fault in self.faults if fault.kind == kind and fault.since <= now < fault.until)

    def clock(self, now: float) -> float:
        return EPOCH + now + self._ahead(now)

    def _ahead(self, now: float) -> float:
        return sum(fault.number for fault in self.present("clock", now))

    def reading(self, now: float, **changes: Any) -> Reading:  # noqa: ANN401 any field of a reading
        """Return what a sample reads ``now``, with ``changes`` of its fields; ask in the order of time."""
        living = [process for process in self.processes if process.listed(now)]
        self._work(living, now)
        visible = not any(self.present("blind", now))
        shown = [process for process in living if visible]
        agents = tuple(self._agents(shown, now))
        refused = sum(fault.number * (now - fault.since) for fault in self.present("refused", now))
        outline = Reading(
            time=self.clock(now),
            monotonic=now,
            boot_time=BOOT + self._ahead(now),
            host_pid_namespace=visible,
            agents=agents,
            agent_socket=AgentSocket(True, len(agents), dict.fromkeys(REASONS, 0) | {"rate": int(refused)}),
        )
        if any(self.present("driver lost", now)):
            reading = replace(outline, failure=("driver-lost", "the driver does not answer"))
        elif over := [fault.until for fault in self.present("released", now)]:
            reading = replace(outline, failure=("released", "for a reset"), released_until=EPOCH + max(over))
        else:
            reading = self._full(outline, shown, now)
        return replace(reading, **changes)

    def _full(self, outline: Reading, shown: Sequence[Process], now: float) -> Reading:
        alive = [each for each in shown if not each.met("dead", now)]
        gone = {fault.gpu for fault in self.present("device gone", now)}
        devices = tuple(
            self._device(gpu, shown, now, outline.time) for n, gpu in enumerate(self.gpus) if n not in gone
        )
        stuck, orphaned = ([each for each in alive if each.met(fate, now)] for fate in _TOLD)
        hidden = [int(fault.number) for fault in self.present("hidden holder", now)]
        failing = {fault.name for fault in self.present("collector", now)}
        xids = [f for f in self.faults if f.kind == "xid" and now - self.interval < f.since <= now]
        return replace(
            outline,
            duration=0.01,
            boot_id="simulated",
            ticks=TICKS,
            driver_version="580.159.04",
            cuda_version="13.0",
            devices=devices,
            rows=tuple(each.row(now) for each in alive),
            cpu_taken=tuple(  # that of a quiet program varies from sample to sample, as it did there
                (each.pid, _QUIET_CPUS[crc32(b"%d %d" % (each.pid, now)) % len(_QUIET_CPUS)])
                for each in alive
            ),
            unseen=dict.fromkeys({each.pid for each in shown} - {each.pid for each in alive}, "gone"),
            waits=tuple(
                DriverWait(each.pid, each.start, each.pid + 1, "os_acquire_mutex", now - each.fates["stuck"])
                for each in stuck
            ),
            ties=tuple(Ties(each.pid, each.start, adopted=True, worker=True, severed=1) for each in orphaned),
            managed=tuple(self._mappings(alive, devices)),
            threads=tuple(self._looks(alive, now)) if self.threads else (),
            ended={each.pid: "its pod has ended" for each in alive if each.met("unowned", now)},
            facts=tuple(self._news(shown, alive, now)),
            hidden=tuple(HiddenHolder(pid, pid * 100, "cuda", "loader", "ada", (0,)) for pid in hidden),
            hidden_unreadable=sum(int(fault.number) for fault in self.present("unreadable", now)),
            events=tuple(XidEvent(self.gpus[f.gpu].uuid(now), int(f.number), outline.time) for f in xids),
            schedulers=self.schedulers,
            collectors={name: (name not in failing, 0.001) for name in ("ledger", "process", "hidden")},
        )

    def _agents(self, shown: Sequence[Process], now: float) -> Iterator[Agent]:
        """Yield the connected agents with their reports; a stopped process sends none."""
        clock = self.clock(now)
        for process in shown:
            uses = {self.gpus[place].uuid(now): self._uses[process, place] for place in process.places}
            if not process.agent or process.met("dead", now) or not any(use.memory for use in uses.values()):
                continue
            heard = min(now, *(process.fates.get(fate, inf) for fate in _SILENCING))
            report = None
            if heard == now:
                pools = {uuid: use.pools for uuid, use in uses.items() if use.memory > CONTEXT}
                newest = self._failures.newest(process.pid, pools, self._around(process, now), clock)
                report = report_of(pools, now - process.begin, newest)
            problem = "" if report else "silent"
            yield Agent(process.pid, process.start, UID, clock - (now - heard), problem, report)

    def _around(self, process: Process, now: float) -> dict[str, Around]:
        """Return what is free on each device of a process, and what other processes hold there."""
        found = {}
        for place in process.places:
            gpu = self.gpus[place]
            held = {who: use.memory for (who, used), use in self._uses.items() if used == place}
            free = max(0, gpu.total - gpu.reserved - gpu.unowned(now) - sum(held.values()))
            found[gpu.uuid(now)] = Around(gpu.total, free, sum(held.values()) - held[process])
        return found

    def _mappings(
        self, alive: Sequence[Process], devices: Sequence[DeviceReading]
    ) -> Iterator[ManagedMappings]:
        """Yield what each process maps of managed memory, over all of its devices, where it is read."""
        pids = {
            entry.pid
            for device in devices
            for entry in device.processes or ()
            if beyond_contexts(uncharged_bytes(device) or 0, len(device.processes or ()))
        }
        for process in (each for each in alive if each.pid in pids):
            mapped = [self._uses[process, place].mapped for place in process.places]
            known = [each for each in mapped if each is not None]
            yield ManagedMappings(process.pid, process.start, sum(known) if known == mapped else None)

    def _looks(self, alive: Sequence[Process], now: float) -> Iterator[ThreadTimes]:
        """Yield at the exporter's pace whose threads ran; a quiet one's helpers wake twice a second."""
        self._ran.update(each for each in alive if any(self._uses[each, place].work for place in each.places))
        if now % LOOK_INTERVAL >= self.interval:
            return
        for process in alive:
            if process.begin > now - LOOK_INTERVAL:
                continue
            ran, wakes = process in self._ran, round(2 * LOOK_INTERVAL)
            yield ThreadTimes(
                process.pid, process.start, now - LOOK_INTERVAL, now, complete=True,
                main_runs=3 * wakes if ran else 0, main_cpu=0.2 * LOOK_INTERVAL if ran else 0.0,
                other_runs=wakes, other_cpu=wakes * HELPER_WAKE_CPU,
                longest=HELPER_WAKE_CPU, beyond=0.0, python=None if ran else True,
            )  # fmt: skip
        self._ran.clear()

    def _work(self, living: Sequence[Process], now: float) -> None:
        """Ask every program what it does; one that is stopped, or has ended, keeps its memory."""
        before, self._uses = self._uses, {}
        for process in living:
            halt = min(process.fates.get(fate, inf) for fate in _HALTING)
            for place, program in process.places.items():
                if now < halt:
                    use = program.use(now - process.begin)
                else:
                    use = before.get((process, place)) or program.use(halt - process.begin)
                    use = use._replace(work=0.0, spins=0.0)
                self._uses[process, place] = use

    def _news(self, shown: Sequence[Process], alive: Sequence[Process], now: float) -> list[ProcessFacts]:
        """Return the facts of listed processes that are new or have another parent."""
        listed = {each.pid for each in shown if any(self._uses[each, place].memory for place in each.places)}
        told, self._told = self._told, {}
        news = []
        for process in alive:
            identity, parent = (process.pid, process.start), process.parent(now).pid
            if process.pid in listed:
                self._told[identity] = parent
                if told.get(identity) != parent:
                    news.append(process.facts(now))
        return news

    def _device(self, gpu: Gpu, shown: Sequence[Process], now: float, clock: float) -> DeviceReading:
        device = DeviceReading(
            gpu.index, gpu.uuid(now), gpu.name, f"0000:{gpu.index + 11:02x}:00.0", gpu.index,
            parent=gpu.parent, mig_profile=gpu.profile, divided=gpu.divided, gpu_instance=gpu.instance,
            compute_instance=None if gpu.instance is None else 0,
        )  # fmt: skip
        place = self.gpus.index(gpu)
        for fault in self.present("device lost", now):
            if fault.gpu == place:
                return device.without_data(fault.name)
        if gpu.divided:
            return device
        uses = {process: self._uses[process, place] for process in shown if place in process.places}
        listed = {process: use for process, use in uses.items() if use.memory}
        everybody = sum(
            use.memory + use.uncharged for (_, used_place), use in self._uses.items() if used_place == place
        )
        used = min(everybody + gpu.unowned(now), gpu.total - gpu.reserved)
        rows = self._rows(place, listed, clock)
        spins = sum(use.spins for use in uses.values())
        busy = round(min(1.0, spins + sum(use.work for use in uses.values() if self._seen(use))), 2)
        device = replace(
            device,
            duration=0.004,
            memory=MemoryReading(gpu.total, gpu.total - gpu.reserved - used, used, gpu.reserved),
            processes=tuple(ProcessEntry(each.pid, use.memory, each.kinds) for each, use in listed.items()),
            utilization={"gpu": busy, "memory": round(busy / 4, 2)},
            process_utilization=None if gpu.parent is not None else rows,
            activity=self._activity(min(1.0, sum(use.work for use in uses.values())), min(1.0, spins))
            if gpu.counters
            else None,
            hardware=gpu.sensors(now),
        )
        return replace(device, **gpu.says)

    def _rows(
        self, place: int, listed: Mapping[Process, Use], clock: float
    ) -> tuple[ProcessUtilization, ...]:
        """Return the driver's new rows: of seen work, otherwise one of 0 % of the process that ran last."""
        workers = [
            process for process, use in listed.items() if use.work + use.spins and "M" not in process.kinds
        ]
        rows = tuple(
            ProcessUtilization(
                each.pid, clock, max(0.01, round(listed[each].work + listed[each].spins, 2)), 0.05, 0.0, 0.0
            )
            for each in workers
            if self._seen(listed[each])
        )
        if workers:
            self._ran_last[place] = rows[-1].pid if rows else workers[-1].pid
        last = self._ran_last.get(place)
        if rows or last not in {each.pid for each in listed}:
            return rows
        return (ProcessUtilization(last, clock, 0.0, 0.0, 0.0, 0.0),)

    def _activity(self, work: float, spins: float) -> dict[str, float]:
        """Return the means of GPM's counters for the shares of time in which kernels worked, or spun."""
        kernels = dict.fromkeys(("occupancy", "tensor", "fp32", "integer"), work / 4)
        kernels["integer"] += spins * 0.0016  # a collective that waited, on an H100
        return {
            "seconds": self.interval, "graphics": max(min(1.0, work + spins), 6e-5),
            "sm": work + spins * 0.18, **kernels, "fp64": 0.0, "fp16": 0.0, "dram": max(work / 4, 4e-6),
            "pcie_transmit": 4e5, "pcie_receive": 2e5, "video": 0.0, "nvlink_transmit": 0.0,
            "nvlink_receive": 0.0,
        }  # fmt: skip

    def _seen(self, use: Use) -> bool:
        """Tell whether one of the driver's samples since the last reading, one a second, shows the work."""
        return self.random.random() < 1 - math.pow(1 - use.seen, max(1.0, self.interval))
