"""Nodes for the dashboards: scenarios of the fault suite, and recordings, up to one moment that is "now"."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from random import Random
from typing import Any
from zlib import crc32

from tests.support.faults import faulty, healthy, recorded, scene
from tests.support.faults.scene import Scene
from tests.support.host.agents import Pools
from tests.support.host.model import EPOCH, GIB, MIB, Fault, Host, Program, Use
from tests.support.host.programs import Torch, WithPools, steady
from tests.support.host.scrapes import Renderer, Weather
from tests.support.host.scrapes import scrapes as host_scrapes
from tests.support.judging import HOME
from vramledger.metrics.access import WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME, WEB_REFUSALS, WEB_REFUSED
from vramledger.metrics.families import Collected, Sample
from vramledger.model.reading import CgroupLimit, Grant, HardwareValue, Scheduler

HOURS = 3.0
END = HOURS * 3600
SCRAPE = 60.0
"""Seconds from one scrape to the next: the longest interval that the rules accept."""

NEWEST = EPOCH + END - SCRAPE
"""Unix time of the newest scrape."""

NOW = NEWEST + 3
"""Unix time of the queries: a range that ends with a scrape also begins with one, and has one too many."""

_SMALL_POOLS: Pools = {
    "cupy": {"pool": 64 * MIB, "in_use": 48 * MIB},
    "rmm": {"pool": 64 * MIB, "in_use": 48 * MIB, "in_use_peak": 50 * MIB},
}

Json = dict[str, Any]
Page = tuple[float, list[str]]
"""Unix time of a scrape and the lines of a series and its value."""


def without_agents(host: Host) -> None:
    for process in host.processes:
        process.agent = False


def with_agents(host: Host) -> None:
    """Let every program have an agent, with CuPy and RMM beside torch; refuse some messages."""
    for process in host.processes:
        process.agent = True
        if process.framework == "torch":
            process.places = {place: WithPools(each, _SMALL_POOLS) for place, each in process.places.items()}
    host.faults = [*host.faults, Fault("refused", number=1 / 600)]


def with_scheduler(host: Host) -> None:
    """Let a kubelet have reserved the first device for a pod that holds it, and for one that does not."""
    with_agents(host)
    pods = sorted({process.owner.name for process in host.processes if process.owner is not None})
    first = (host.gpus[0].uuid(0),)
    grants = tuple(Grant("pod", name, first) for name in [*pods[:1], "team-b/waiting"])
    host.schedulers = (Scheduler("kubelet", ("*",), grants),)


def with_limits(host: Host) -> None:
    """Let cgroups limit the first device: of one it is known what is taken, of others nothing is known."""
    with_agents(host)
    taken: dict[str, int] = {}
    for process in host.processes:
        process.cgroup = f"/user.slice/{process.user}"
        here = process.places.get(0)
        held = 0 if here is None else here.use(HOURS * 1800).memory or 0
        taken[process.cgroup] = taken.get(process.cgroup, 0) + held
    host.gpus[0].says["limits"] = tuple(
        CgroupLimit(place, 0, 80 * GIB, None if number else taken[place])
        for number, place in enumerate(sorted(taken))
    )


def with_errors(host: Host) -> None:
    """Give the first device an XID error, all devices all sensors, and make some files unreadable."""
    with_agents(host)
    for gpu in host.gpus:
        gpu.sensors = _sensors
    host.faults = [*host.faults, Fault("xid", 2.5 * 3600, number=63), Fault("unreadable", number=3)]


@dataclass(slots=True)
class _WithManaged:
    """A program that has managed memory besides."""

    program: Program
    resident: int
    mapped: int
    pools: Pools = field(default_factory=dict)

    def use(self, age: float) -> Use:
        use = self.program.use(age)
        if not use.memory:
            return use
        pools = {**use.pools, **self.pools}
        return use._replace(uncharged=self.resident, mapped=self.mapped, pools=pools)


def small_jobs_apart(random: Random) -> Scene:
    """Two small jobs on a GPU each, of which one could have both."""
    gpus = [scene.card(random, place, 81_559) for place in range(2)]
    jobs = [
        scene.process(random, Torch(steady(size * GIB), lambda _: 0.2), place, agent=True)
        for place, size in enumerate((8, 12))
    ]
    return Scene(gpus, jobs, hours=HOURS, onset=None)


def with_managed_memory(host: Host) -> None:
    """Let the first program have managed memory, in a larger pool, and others more mappings than bytes."""
    for process in host.processes:
        last, first = max(process.places), process is host.processes[0]
        resident, mapped = (4 * GIB, 4 * GIB) if first else (GIB, 64 * GIB)
        process.agent |= first
        pools: Pools = {"jax": {"pool": 79 * GIB, "in_use": 2 * GIB, "limit": 79 * GIB}} if first else {}
        process.places = {**process.places, last: _WithManaged(process.places[last], resident, mapped, pools)}


def wait_for_a_rank(host: Host) -> None:
    """Let all devices be busy and compute nothing, as in a collective that waits for a lost rank."""
    with_errors(host)
    waiting = dict.fromkeys(("tensor", "fp16", "fp32", "fp64", "dram", "video", "occupancy"), 0.0)
    links = dict.fromkeys(("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive"), 1e5)
    activity = {"seconds": SCRAPE, "graphics": 1.0, "sm": 0.18, "integer": 0.0016, **waiting, **links}
    for gpu in host.gpus:
        gpu.says = {"utilization": {"gpu": 1.0, "memory": 0.0}, "activity": activity}


def release(host: Host) -> None:
    """Let the exporter have released the GPUs ten minutes ago, for twenty."""
    host.faults = [*host.faults, Fault("released", END - 600, END + 600)]


def _temperature(celsius: float, _: float) -> Mapping[str, HardwareValue]:
    return {"device_temperature_celsius": celsius}


def _sensors(now: float) -> Mapping[str, HardwareValue]:
    return {
        "device_temperature_celsius": 41.0,
        "device_memory_temperature_celsius": 38.0,
        "device_power_watts": 412.5,
        "device_power_limit_watts": 700.0,
        "device_clock_hertz": {"sm": 1.98e9, "memory": 3.2e9},
        "device_throttle_active": {"sw_power_cap": 0.0, "hw_slowdown": 0.0},
        "device_ecc_errors_total": {"corrected": float(now // 3600), "uncorrected": 0.0},
        "device_remapped_rows": {"correctable": 1.0, "uncorrectable": 0.0},
        "device_bar1_memory_bytes": {"total": 256.0 * GIB, "used": 2.0 * MIB},
        "device_energy_joules_total": 400.0 * now,
        "device_pcie_throughput_bytes_per_second": {"sent": 2e8, "received": 9e8},
    }


@dataclass(frozen=True, slots=True)
class Node:
    name: str  # its ``instance``
    build: Callable[[Random], Scene]  # the scenario
    seed: int = 1  # its variation
    prepare: Callable[[Host], None] = without_agents  # gives it what it has besides
    weather: Weather = field(default_factory=Weather)  # what happens between its exporter and Prometheus


FAULTY = {scenario.name: scenario.build for scenario in faulty.FAULTY}

NODES = (
    Node("hoarder", faulty.hoarder_while_short, prepare=with_agents),
    Node("pod", faulty.pod_ended, 2, prepare=with_scheduler),
    Node("leak", faulty.gradients_kept, 2, prepare=with_errors),
    Node("large-moment", faulty.one_large_moment, 2, prepare=with_agents),
    Node("tensorflow", FAULTY["tensorflow-shared"], prepare=with_agents),
    Node("jax", FAULTY["jax-shared"], prepare=with_limits),
    *(
        Node(name, FAULTY[name], prepare=with_agents)
        for name in ("fragmented", "out-of-memory", "agent-silent")
    ),
    Node("notebook", faulty.idle_notebook, 3),
    Node("orphan", faulty.orphaned, 3),
    Node("hidden", faulty.hidden_holder),
    *(
        Node(name, FAULTY[name])
        for name in "dead zombie stopped unattributed blind device-lost driver-lost".split()
    ),
    Node("down", healthy.training, weather=Weather(down=((END - 1200, inf),))),
    Node("stalled", healthy.training, 2, weather=Weather(stalled=END - 1200)),
    Node("released", healthy.nobody, prepare=release),
    Node("mig", healthy.mig),
    Node("ranks", healthy.ranks, prepare=with_agents),
    Node("small-jobs", healthy.small_jobs),
    Node("managed", healthy.shared_well, prepare=with_managed_memory),
    Node("apart", small_jobs_apart, prepare=with_agents),
    Node("waits", healthy.ranks, 2, prepare=wait_for_a_rank),
)

_AS_IT_WAS = "policies lively orphans-fork mps-clients notebook-kernel busy-and-idle".split()
RECORDED = {**dict.fromkeys(_AS_IT_WAS, 1.0), recorded.FAULTS: recorded.STRETCH}
"""Recordings of real H200s, and the factor by which they are stretched; each is held until "now"."""


def simulated_pages(node: Node) -> Iterator[Page]:
    random = Random(f"{node.name}/{node.seed}")  # noqa: S311 it is chance for tests
    host = node.build(random).build(random, SCRAPE)
    for gpu in host.gpus:
        # A temperature of its own: which of equal values topk takes differs from query to query.
        gpu.sensors = partial(_temperature, 30.0 + crc32(gpu.uuid(0).encode()) % 4000 / 100)
    node.prepare(host)
    chance = Random(f"{node.name}/{node.seed}/weather")  # noqa: S311 it is chance for tests
    weather = replace(node.weather, every=SCRAPE)
    for at, _, lines in host_scrapes(host, HOURS, weather, chance, Renderer(collect_own=_web_metrics)):
        yield EPOCH + at, lines


def recorded_pages(name: str) -> Iterator[Page]:
    """Yield what Prometheus would scrape of a recording that is held at its last reading."""
    renderer = Renderer(collect_own=_web_metrics)
    pages = recorded.recorded_scrapes(HOME / f"{name}.jsonl.gz", renderer, RECORDED[name], END, SCRAPE)
    for number, lines in enumerate(itertools.islice(pages, int(END / SCRAPE))):
        # Recordings are masked, and their GPUs have the same UUIDs: give them different ones.
        own = f"GPU-{[*RECORDED].index(name):04}"
        yield EPOCH + number * SCRAPE, [line.replace("GPU-0000", own) for line in lines]


def _web_metrics() -> Collected:
    """Return the samples of a valid web configuration file, and of one wrong password."""
    refusals: list[Sample] = [((reason,), float(reason == "password")) for reason in WEB_REFUSALS]
    loaded: Collected = [(WEB_CONFIG_LOADED, [((), 1.0)]), (WEB_CONFIG_LOADED_TIME, [((), EPOCH)])]
    return [(WEB_REFUSED, refusals), *loaded]


def scrapes() -> Mapping[str, Iterable[Page]]:
    return {
        **{node.name: simulated_pages(node) for node in NODES},
        **{f"recorded-{name}": recorded_pages(name) for name in RECORDED},
    }
