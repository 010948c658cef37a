"""A labelled scenario: what happens to a host, and which alerts must, may and must not fire."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.support.host import programs
from tests.support.host.model import GIB, MIB, Fault, Gpu, Host, Process, Program
from tests.support.host.programs import Torch
from tests.support.host.scrapes import Weather
from vramledger.model.reading import Scheduler

MODELS = {
    24_265: "NVIDIA A30", 40_960: "NVIDIA A100-SXM4-40GB", 48_000: "NVIDIA RTX A6000",
    81_559: "NVIDIA H100 80GB HBM3", 143_771: "NVIDIA H200",
}  # fmt: skip
"""The cards that a scenario may have, by MiB of memory. Whatever its name, a card has the sensors of an H200,
unless the scenario says otherwise."""

HOUR = 3600.0
MINUTE = 60.0
DAY = 24.0
FOUND = 120.0
"""Seconds, beyond an alert's own ``for``, within which a visible fault must be found."""


@dataclass(slots=True)
class Scene:
    gpus: Sequence[Gpu]  # see :class:`tests.support.host.model.Gpu`
    processes: Sequence[Process]  # who comes and goes
    hours: float = DAY  # how long it is watched
    onset: float | None = None  # when the fault begins, seconds; None for a healthy one
    weather: Weather = field(default_factory=Weather)  # what happens between exporter and Prometheus
    faults: Sequence[Fault] = ()  # what is wrong with the host, and when
    schedulers: tuple[Scheduler, ...] = ()  # what they have reserved
    threads: bool = False  # whether the exporter looks at the holders' threads

    def build(self, random: Random, interval: float) -> Host:
        return Host(self.gpus, self.processes, random, interval, self.faults, self.schedulers, self.threads)


Build = Callable[[Random], Scene]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str  # what the table calls it
    build: Build  # makes a variation from a seed
    expects: tuple[str, ...] = ()  # alerts that must fire, every one of them
    allows: frozenset[str] = frozenset()  # alerts that may fire besides, being true as well
    always: frozenset[str] = frozenset()  # those that may fire before the onset too
    within: float | None = None  # seconds after the onset, beyond its ``for``; None where any time will do
    leak: bool = False  # it must be found before the card is full to nine tenths
    alone: bool = False  # nothing else is watched by its Prometheus

    @property
    def healthy(self) -> bool:
        return not self.expects


def card(random: Random, index: int = 0, size: int | None = None, **more: object) -> Gpu:
    """Make a GPU of one of :data:`MODELS`, with its own UUID; an instance has a size and name of its own."""
    size = size or random.choice([*MODELS])
    total = size * MIB
    noise = random.randint(0, 60) * MIB
    known: dict[str, object] = {
        "unowned": lambda _: noise,
        "uuids": ((0.0, uuid(random)),),
        "reserved": total // 230,
        "name": more.get("name") or MODELS[size],
    }
    return Gpu(index, total, **{**known, **more})  # type: ignore[arg-type]


def uuid(random: Random) -> str:
    text = f"{random.getrandbits(128):032x}"
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def process(random: Random, program: Program, index: int = 0, **more: object) -> Process:
    """Make a process of some user with one program on one device."""
    known: dict[str, object] = {
        "user": random.choice(["ada", "grace", "edsger", "barbara", "donald"]),
        "agent": random.random() < 0.5,
    }
    return Process(random.randint(2000, 4_000_000), {index: program}, **{**known, **more})  # type: ignore[arg-type]


def rough(random: Random) -> Weather:
    """Make the weather of an ordinary day: some scrapes are lost, once the exporter restarts."""
    restart = random.uniform(0.1, 0.9) * DAY * HOUR
    return Weather(
        missing=random.choice([0.0, 0.002, 0.01]), down=((restart, restart + 20),), restarts=(restart + 20,)
    )


def share(place: Gpu, part: float) -> float:
    """Return a part of the memory that a card has for programs, bytes."""
    return part * (place.total - place.reserved - GIB)


def hiccups(random: Random) -> Weather:
    """Make the weather of an hour: some scrapes are lost."""
    return Weather(missing=random.choice([0.0, 0.005, 0.02]))


def after(  # noqa: PLR0913, PLR0917 the last line of many scenes
    onset: float, random: Random, gpus: Sequence[Gpu], processes: Sequence[Process], hours: float,
    faults: Sequence[Fault] = (), schedulers: tuple[Scheduler, ...] = (),
) -> Scene:  # fmt: skip
    """Make a scene in which something begins at a moment, and is watched for some hours more."""
    return Scene(gpus, processes, onset / HOUR + hours, onset, hiccups(random), faults, schedulers)


def named(name: str, build: Callable[..., Scene], **given: object) -> Build:
    """Give a scene that needs more than chance what it needs, and a name of its own."""

    def made(random: Random) -> Scene:
        return build(random, **given)

    made.__name__ = name
    return made


def beside_a_job(name: str, hours: float, begins: Callable[[float], Fault | Weather]) -> Build:
    """Return a scene in which a job works while, from a moment on, there is a fault or another weather."""

    def build(random: Random) -> Scene:
        gpu = card(random)
        onset = soon(random)
        job = process(random, Torch(programs.steady(share(gpu, 0.5))))
        begun = begins(onset)
        if isinstance(begun, Weather):
            return Scene([gpu], [job], onset / HOUR + hours, onset, begun)
        return after(onset, random, [gpu], [job], hours, [begun])

    build.__name__ = name
    return build


def soon(random: Random) -> float:
    return random.uniform(10, 50) * MINUTE


def plain(
    build: Build,
    *expects: str,
    allows: tuple[str, ...] = (),
    always: tuple[str, ...] = (),
    within: float | None = None,
) -> Scenario:
    """Label a visible fault, which is found within seconds after the alert's ``for``."""
    name = build.__name__.replace("_", "-")
    return Scenario(name, build, expects, frozenset(allows), frozenset(always), within)
