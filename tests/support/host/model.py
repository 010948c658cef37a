"""A simulated host with GPUs: what NVML and /proc would say of it at any moment, as a real ``Reading``.

Nothing is judged here. Programs (``programs.py``) say what they take and how they work; this module adds
what a real host adds, as measured on H200s: the driver's reserve, bytes of nobody, utilisation samples that
miss small work, facts told once, pids that the driver lists although nobody is there any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import NamedTuple, Protocol

from vramledger.model.reading import (
    DeviceReading,
    HiddenHolder,
    MemoryReading,
    Owner,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Reading,
    Scheduler,
    XidEvent,
)

MIB = 2**20
GIB = 2**30
EPOCH = 7_200
"""Unix time of a simulation's beginning: promtool's tests begin at 0, and no time may be negative."""

BOOT = 600
TICKS = 100
RESERVED = 615 * MIB
CONTEXT = 518 * MIB
"""Bytes of a bare context on an H200."""

LIBRARIES = {
    "torch": ("libtorch_cuda", "libcuda"),
    "vllm": ("vllm", "libtorch_cuda", "libcuda"),
    "tensorflow": ("libtensorflow", "libcuda"),
    "jax": ("xla_cuda_plugin", "libjax_common", "libcuda"),
    "cuda": ("libcuda",),
}
"""The signs of the libraries that a program of a framework has mapped, as the sampler names them."""


class Use(NamedTuple):
    """What a program does with one device at one moment.

    ``memory`` is bytes as NVML would list them, 0 before its context exists. ``work`` is the share of time
    that its kernels run, ``seen`` the share of seconds with work that leave a utilisation sample.
    ``agent`` holds the allocator's figures by family name without prefix, as the agent would report them.
    """

    memory: int
    work: float = 0.0
    seen: float = 1.0
    agent: Mapping[str, float] = {}


class Program(Protocol):
    """How a program uses a device, asked in the order of time."""

    def use(self, age: float) -> Use:
        """Say what it does ``age`` seconds after its start."""


@dataclass(slots=True, eq=False)
class Process:
    """One process of the host and its fate; times are seconds after :data:`EPOCH`.

    Attributes:
        pid: in the host's namespace.
        places: the program by the index of the device that it uses.
        begin: when it starts.
        end: when it is gone, and its memory with it.
        user: who runs it.
        command: the program's name.
        framework: a key of :data:`LIBRARIES`.
        owner: who answers for it, besides the user.
        settings: environment variables that steer GPU memory.
        signs: what says that it is somebody's worker.
        kinds: which of NVML's lists name it; with ``M`` the driver books its work on the MPS server.
        agent: it runs our agent.
        silent: from when on its agent says nothing any more.
        stopped: when it gets SIGSTOP.
        zombie: when its main thread ends while another lives on.
        dead: from when on the driver lists it although it is gone.
        orphaned: when the program that started it ends.
        unowned: when its owner ends: container, pod or job.
    """

    pid: int
    places: Mapping[int, Program]
    begin: float = 0.0
    end: float = inf
    user: str = "ada"
    command: str = "train.py"
    framework: str = "torch"
    owner: Owner | None = None
    settings: tuple[tuple[str, str], ...] = ()
    signs: tuple[str, ...] = ()
    kinds: str = "C"
    agent: bool = False
    silent: float = inf
    stopped: float = inf
    zombie: float = inf
    dead: float = inf
    orphaned: float = inf
    unowned: float = inf

    @property
    def start(self) -> int:
        """Its start in ticks since boot; with the pid, who it is."""
        return round((EPOCH - BOOT + self.begin) * TICKS)

    def listed(self, now: float) -> bool:
        """Tell whether it exists, or the driver still says so."""
        return self.begin <= now < self.end

    def parent(self, now: float) -> ParentFacts:
        """Return who its parent is at a moment."""
        if now >= self.orphaned:
            return ParentFacts(1, 1, "systemd", "systemd", init=True)
        return ParentFacts(self.pid - 1, self.start - 50, "python", "launch.py", init=False)

    def facts(self, now: float) -> ProcessFacts:
        """Return what is read once for it."""
        return ProcessFacts(
            pid=self.pid,
            start=self.start,
            uid=1000,
            user=self.user,
            comm=self.command[:15],
            command=self.command,
            signs=self.signs,
            owner=self.owner or Owner("user", self.user),
            libraries=LIBRARIES[self.framework],
            settings=self.settings,
            parent=self.parent(now),
            leader_alive=now < self.orphaned,
        )

    def row(self, now: float) -> ProcessRow:
        """Return what /proc/PID/stat says."""
        state, threads = "S", 12
        if now >= self.zombie:
            state, threads = "Z", 2
        elif now >= self.stopped:
            state = "T"
        parent = self.parent(now).pid
        return ProcessRow(self.pid, self.start, state, parent, self.pid - 1, self.pid - 1, 0, threads)


@dataclass(slots=True, eq=False)
class Card:
    """One device: a GPU, a MIG instance, or the GPU that instances divide.

    ``nobody`` gives the bytes that no process holds, by time; ``lost`` is (from, until) without an answer,
    ``uuids`` (from when, which one), so that a card can be replaced under its index.
    """

    index: int = 0
    total: int = 143_771 * MIB
    reserved: int = RESERVED
    nobody: Callable[[float], int] = lambda _: 14 * MIB
    lost: tuple[float, float] = (inf, inf)
    uuids: tuple[tuple[float, str], ...] = ()
    parent: str | None = None
    profile: str | None = None
    divided: bool = False

    def uuid(self, now: float) -> str:
        """Return the identity of the card that is in this place at a moment."""
        return [uuid for since, uuid in self.uuids if since <= now][-1]


@dataclass(slots=True)
class Host:
    """A host, its cards and processes; the clock that it stamps readings with may be skewed.

    ``hidden`` is (from, until, pid) of processes with a device open that NVML does not list, ``failing`` a
    span in which NVML as a whole does not answer, ``errors`` are (time, index, XID). ``visible`` is False
    where the exporter does not share the host's PID namespace. ``schedulers`` says what they have reserved,
    ``broken`` is (since, name) of a collector that fails.
    """

    cards: Sequence[Card]
    processes: Sequence[Process]
    random: Random
    interval: float
    skew: float = 0.0
    hidden: Sequence[tuple[float, float, int]] = ()
    failing: tuple[float, float] = (inf, inf)
    errors: Sequence[tuple[float, int, int]] = ()
    visible: bool = True
    schedulers: tuple[Scheduler, ...] = ()
    broken: tuple[float, str] = (inf, "")
    uses: dict[tuple[int, int], Use] = field(default_factory=dict)
    _told: dict[tuple[int, int], int] = field(default_factory=dict)

    def forget(self) -> None:
        """Begin anew, as the sampler of an exporter that was restarted does: everything is told again."""
        self._told.clear()

    def living(self, now: float) -> list[Process]:
        """Return who holds memory, or is still said to."""
        return [process for process in self.processes if process.listed(now)]

    def reading(self, now: float) -> Reading:
        """Return what a sample reads at a moment, in the order of time."""
        clock = EPOCH + now + self.skew
        living = self.living(now)
        self._work(living, now)
        if self.failing[0] <= now < self.failing[1]:
            return Reading(
                time=clock, monotonic=now, boot_time=BOOT + self.skew, host_pid_namespace=self.visible,
                failure=("driver-lost", "the driver does not answer"),
            )  # fmt: skip
        shown = [process for process in living if self.visible]
        alive = [process for process in shown if now < process.dead]
        return Reading(
            time=clock,
            monotonic=now,
            duration=0.01,
            boot_id="simulated",
            boot_time=BOOT + self.skew,
            ticks=TICKS,
            host_pid_namespace=self.visible,
            driver_version="580.159.04",
            cuda_version="13.0",
            devices=tuple(self._device(card, shown, now, clock) for card in self.cards),
            rows=tuple(process.row(now) for process in alive),
            unseen={process.pid: "gone" for process in shown if now >= process.dead},
            ended={process.pid: "its pod has ended" for process in alive if now >= process.unowned},
            facts=tuple(self._news(alive, now)),
            hidden=tuple(
                HiddenHolder(pid, pid * 100, "cuda", "loader", "ada", (0,))
                for since, until, pid in self.hidden
                if since <= now < until
            ),
            events=tuple(
                XidEvent(self.cards[index].uuid(now), xid, clock)
                for at, index, xid in self.errors
                if now - self.interval < at <= now
            ),
            schedulers=self.schedulers,
            collectors={
                name: (now < self.broken[0] or name != self.broken[1], 0.001)
                for name in ("ledger", "process", "hidden")
            },
        )

    def _work(self, living: Sequence[Process], now: float) -> None:
        self.uses = {
            (process.pid, index): program.use(now - process.begin)
            if now < min(process.stopped, process.zombie, process.dead)
            else self.uses[process.pid, index]._replace(work=0.0)
            for process in living
            for index, program in process.places.items()
        }

    def _news(self, alive: Sequence[Process], now: float) -> list[ProcessFacts]:
        news = []
        for process in alive:
            identity, parent = (process.pid, process.start), process.parent(now).pid
            if self._told.get(identity) != parent and any(
                self.uses[process.pid, index].memory for index in process.places
            ):
                self._told[identity] = parent
                news.append(process.facts(now))
        return news

    def _device(self, card: Card, shown: Sequence[Process], now: float, clock: float) -> DeviceReading:
        about = DeviceReading(
            card.index, card.uuid(now), "NVIDIA H200", f"0000:{card.index + 11:02x}:00.0", card.index,
            parent=card.parent, mig_profile=card.profile, divided=card.divided,
        )  # fmt: skip
        if card.lost[0] <= now < card.lost[1]:
            return about.without_data("lost")
        if card.divided:
            return about
        place = self.cards.index(card)
        uses = {process: self.uses[process.pid, place] for process in shown if place in process.places}
        listed = {process: use for process, use in uses.items() if use.memory}
        everybody = sum(self.uses[key].memory for key in self.uses if key[1] == place)
        used = min(everybody + card.nobody(now), card.total - card.reserved)
        samples = [
            ProcessUtilization(process.pid, clock, max(0.01, round(use.work, 2)), 0.05, 0.0, 0.0)
            for process, use in listed.items()
            if use.work and "M" not in process.kinds and self._seen(use)
        ]
        busy = sum(use.work for use in uses.values() if self._seen(use))
        return DeviceReading(
            index=about.index, uuid=about.uuid, name=about.name, pci_bus_id=about.pci_bus_id,
            minor=about.minor, parent=about.parent, mig_profile=about.mig_profile, duration=0.004,
            memory=MemoryReading(card.total, card.total - card.reserved - used, used, card.reserved),
            processes=tuple(ProcessEntry(each.pid, use.memory, each.kinds) for each, use in listed.items()),
            utilization={"gpu": round(min(1.0, busy), 2), "memory": round(min(1.0, busy) / 4, 2)},
            process_utilization=None if card.parent is not None else tuple(samples),
            hardware={"device_temperature_celsius": 41.0},
        )  # fmt: skip

    def _seen(self, use: Use) -> bool:
        """Tell whether one of the driver's samples since the last reading, one a second, shows the work."""
        return self.random.random() < 1 - math.pow(1 - use.seen, max(1.0, self.interval))
