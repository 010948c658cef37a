"""Nodes for the dashboards to show: scenarios of the fault suite with agents, schedulers and hardware.

Each is simulated for some hours through the real history, metrics and exposition, up to one moment that is
"now" for all. Recordings of real GPUs are among them, held at their last reading.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.support.faults import faulty, healthy, recorded
from tests.support.faults.scene import Scene
from tests.support.host.model import BOOT, CONTEXT, EPOCH, GIB, MIB, TICKS, Host, Process
from tests.support.judging import HOME
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import COLLECTORS, IDLE_AFTER
from vramledger.metrics.access import WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME, WEB_REFUSALS, WEB_REFUSED
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Collected, Sample
from vramledger.model.agent_report import (
    REASONS,
    Agent,
    AgentReport,
    AgentSocket,
    DeviceReport,
    FrameworkReport,
    GarbageReport,
    OutOfMemory,
)
from vramledger.model.reading import DeviceReading, Grant, HardwareValue, Reading, Scheduler, XidEvent
from vramledger.sampling.replay import read_recording, shift_times

HOURS = 3.0
SCRAPE = 15.0
NOW = EPOCH + HOURS * 3600 - SCRAPE
"""Unix time of the newest scrape."""

_WANT = ScrapeRequest(frozenset(COLLECTORS))
_POLICIES = {"torch": "caching", "tensorflow": "preallocate", "jax": "fraction"}

Json = dict[str, Any]
Page = tuple[float, list[str]]
"""Unix time of a scrape and the lines of a series and its value."""


@dataclass(frozen=True, slots=True)
class Node:
    """A simulated node.

    Attributes:
        name: its ``instance``.
        build: the scenario.
        seed: its variation.
        down: seconds before "now" from which nothing answers.
        stalled: the same, from which it answers with an old sample.
        released: the same, from which it has let go of its GPUs on purpose.
        change: what it has besides.
    """

    name: str
    build: Callable[[Random], Scene]
    seed: int = 1
    down: float = -1.0
    stalled: float = -1.0
    released: float = -1.0
    change: Callable[[Host, Reading], Reading] = lambda _host, reading: reading


def with_agents(host: Host, reading: Reading) -> Reading:
    """Let every program with a framework have an agent that reports over the socket."""
    now = reading.monotonic
    alive = {row.pid for row in reading.rows}
    agents = [
        _agent(host, process, reading)
        for process in host.living(now)
        if process.pid in alive and process.agent and not process.met("stopped", now)
    ]
    socket = AgentSocket(True, len(agents), dict.fromkeys(REASONS, 0) | {"rate": int(now // 600)})
    return replace(reading, agents=tuple(agents), agent_socket=socket)


def _agent(host: Host, process: Process, reading: Reading) -> Agent:
    now = reading.monotonic
    if process.met("silent", now):
        return Agent(process.pid, process.start, 1000, EPOCH + process.fates["silent"], "silent", None)
    reported: dict[str, list[DeviceReport]] = {}
    failed = False
    for index in process.places:
        use = host.uses[process.pid, index]
        if not use.agent or use.memory <= CONTEXT:
            continue
        framework = process.framework
        figures = {
            name.partition("_")[2].removesuffix("_bytes").removesuffix("_total"): int(value)
            for name, value in use.agent.items()
        }
        failed = failed or figures.get("ooms", 0) > 0
        if framework == "torch":
            figures["private_pools"] = figures["reserved"] // 50
        if framework == "tensorflow":
            figures["pool"] = figures["limit"]
        uuid = host.gpus[index].uuid(now)
        parts = ("parameters", "gradients", "optimizer", "activations")
        quarter = figures.get("allocated", 0) // 4
        categories = dict.fromkeys(parts, quarter) if framework == "torch" else {}
        reported.setdefault(framework, []).append(DeviceReport(None, uuid, figures, categories))
        if framework == "torch":
            small = {"pool": 64 * MIB, "in_use": 48 * MIB}
            reported.setdefault("cupy", []).append(DeviceReport(None, uuid, small, {}))
            reported.setdefault("rmm", []).append(
                DeviceReport(None, uuid, {**small, "in_use_peak": 50 * MIB}, {})
            )
    report = AgentReport(
        sequence=int(now),
        interval=1.0,
        dropped=0,
        agent="0.1",
        python="3.11.9",
        errors={"torch": 0},
        collector=GarbageReport(enabled=True, collections=int(now // 30), freed_bytes=int(now) * MIB),
        frameworks=tuple(
            FrameworkReport(name, "1", policy=_POLICIES.get(name), devices=tuple(devices))
            for name, devices in reported.items()
        ),
        last_oom=OutOfMemory(reading.time - 60, "torch", 0, 2 * GIB, "hoarded", None) if failed else None,
    )
    return Agent(process.pid, process.start, 1000, reading.time, "", report)


def with_scheduler(host: Host, reading: Reading) -> Reading:
    """Let a kubelet have reserved the first device for a pod that holds it, and for one that does not."""
    reading = with_agents(host, reading)
    first = reading.devices[0].uuid if reading.devices else ""
    pods = sorted({process.owner.name for process in host.processes if process.owner is not None})
    grants = tuple(Grant("pod", name, (first,)) for name in [*pods[:1], "team-b/waiting"])
    return replace(reading, schedulers=(Scheduler("kubelet", ("*",), grants),))


def with_errors(host: Host, reading: Reading) -> Reading:
    """Let the first device have had an XID error, and all of them have all their sensors."""
    reading = with_agents(host, reading)
    at = 2.5 * 3600
    hit = reading.devices and at <= reading.monotonic < at + SCRAPE
    events = (XidEvent(reading.devices[0].uuid, 63, reading.time),) if hit else ()
    devices = tuple(_sensors(device, reading.monotonic) for device in reading.devices)
    return replace(reading, events=reading.events + events, devices=devices, hidden_unreadable=3)


def _sensors(device: DeviceReading, now: float) -> DeviceReading:
    hardware: Mapping[str, HardwareValue] = {
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
    return replace(device, hardware=hardware)


NODES = (
    Node("hoarder", faulty.hoarder_while_short, change=with_agents),
    Node("pod", faulty.pod_ended, 2, change=with_scheduler),
    Node("leak", faulty.gradients_kept, 2, change=with_errors),
    Node("large-moment", faulty.one_large_moment, 2, change=with_agents),
    Node("tensorflow", faulty.tensorflow_shared, change=with_agents),
    Node("jax", faulty.jax_shared, change=with_agents),
    Node("fragmented", faulty.fragmented, change=with_agents),
    Node("out-of-memory", faulty.out_of_memory, change=with_agents),
    Node("agent-silent", faulty.agent_silent, change=with_agents),
    Node("notebook", faulty.idle_notebook, 3),
    Node("orphan", faulty.orphaned, 3),
    Node("dead", faulty.dead),
    Node("zombie", faulty.zombie),
    Node("stopped", faulty.stopped),
    Node("unattributed", faulty.unattributed),
    Node("hidden", faulty.hidden_holder),
    Node("blind", faulty.blind),
    Node("device-lost", faulty.device_lost),
    Node("driver-lost", faulty.driver_lost),
    Node("down", healthy.training, down=1200.0),
    Node("stalled", healthy.training, 2, stalled=1200.0),
    Node("released", healthy.nobody, released=600.0),
    Node("mig", healthy.mig),
    Node("ranks", healthy.ranks, change=with_agents),
    Node("small-jobs", healthy.small_jobs),
)

RECORDED = {
    "policies": 1.0,
    "lively": 1.0,
    "orphans-fork": 1.0,
    "mps-clients": 1.0,
    "notebook-kernel": 1.0,
    recorded.FAULTS: recorded.STRETCH,
}
"""Recordings of real H200s, and how far their time is drawn out; each goes on at its end until "now"."""


def simulated_pages(node: Node) -> Iterator[Page]:
    """Yield what Prometheus would scrape of a simulated node."""
    random = Random(f"{node.name}/{node.seed}")  # noqa: S311 it is chance for tests
    scene = node.build(random)
    host = scene.build(random, SCRAPE)
    for process in host.processes:
        process.agent = process.agent or node.change is not NODES[-1].change
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=SCRAPE)
    page = _Renderer()
    end = HOURS * 3600
    snapshot = None
    at = 0.0
    while at < end:
        left = end - at
        if snapshot is None or left > node.stalled:
            reading = node.change(host, host.reading(at))
            if left <= node.released:
                reading = replace(
                    reading, failure=("released", "for a reset"), released_until=EPOCH + end + 600, devices=()
                )
            snapshot = tracker.update(reading)
        yield EPOCH + at, ["up 0"] if left <= node.down else page.lines(snapshot)
        at += SCRAPE


def recorded_pages(name: str) -> Iterator[Page]:
    """Yield what Prometheus would scrape of a recording that goes on at its last reading."""
    readings = list(read_recording(HOME / f"{name}.jsonl.gz"))
    notes = _notes(HOME / f"{name}.notes.gz")
    uids = {fact.pid: fact.uid for each in readings for fact in each.facts if fact.uid is not None}
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=SCRAPE)
    page = _Renderer()
    taken = 0
    for number in range(int(HOURS * 3600 / SCRAPE)):
        at = number * SCRAPE
        due = [each for each in readings if (each.time - readings[0].time) * RECORDED[name] <= at]
        fresh, taken = due[taken:], len(due)
        reading = replace(
            due[-1],
            facts=tuple(fact for each in fresh for fact in each.facts),
            events=tuple(event for each in fresh for event in each.events),
            agents=tuple(_agents_from_notes(due[-1], notes, uids)),
        )
        there = replace(shift_times(reading, EPOCH + at - reading.time), monotonic=at)
        there = replace(there, agents=tuple(each._replace(received=there.time) for each in there.agents))
        lines = page.lines(tracker.update(there))
        # Recordings are masked, and their GPUs have the same UUIDs: give them some of their own.
        yield EPOCH + at, [line.replace("GPU-0000", f"GPU-{[*RECORDED].index(name):04}") for line in lines]


def _notes(path: Path) -> list[Json]:
    """Return what the programs of a recording wrote down of their allocators, in the order of time."""
    lines = gzip.decompress(path.read_bytes()).splitlines() if path.exists() else []
    return sorted((json.loads(line) for line in lines), key=lambda each: float(each["time"]))


def _agents_from_notes(reading: Reading, notes: Iterable[Json], uids: Mapping[int, int]) -> Iterator[Agent]:
    """Yield the agents that programs with notes would have had: their newest figures, on their device."""
    newest = {int(each["pid"]): each["figures"] for each in notes if each["time"] <= reading.time}
    starts = {row.pid: row.start for row in reading.rows}
    held = {
        entry.pid: device.uuid
        for device in reading.devices
        for entry in device.processes or ()
        if entry.pid in newest and entry.pid in starts
    }
    for pid, uuid in held.items():
        reported = FrameworkReport(
            "torch", "1", policy="caching", devices=(_device_report("torch", newest[pid], uuid),)
        )
        report = AgentReport(sequence=1, interval=1.0, frameworks=(reported,))
        yield Agent(pid, starts[pid], uids.get(pid, 0), reading.time, "", report)


def _device_report(framework: str, reported: Mapping[str, float], uuid: str) -> DeviceReport:
    """Return a framework's figures of one device, from those of the metric contract."""
    figures = {
        name.removeprefix(f"{framework}_").removesuffix("_bytes").removesuffix("_total"): int(value)
        for name, value in reported.items()
    }
    return DeviceReport(None, uuid, figures, {})


def _web_metrics() -> Collected:
    """Say what a web configuration file that is well, and one wrong password, come to."""
    refusals: list[Sample] = [((reason,), float(reason == "password")) for reason in WEB_REFUSALS]
    return [
        (WEB_REFUSED, refusals),
        (WEB_CONFIG_LOADED, [((), 1.0)]),
        (WEB_CONFIG_LOADED_TIME, [((), EPOCH)]),
    ]


class _Renderer:
    """Renders pages as the exporter does, with what Prometheus adds to a scrape."""

    def __init__(self) -> None:
        self._exposition = Exposition(100, lambda: None, clock=lambda: 0.0, access=_web_metrics)

    def lines(self, snapshot: object) -> list[str]:
        """Return the lines of a scrape that succeeded."""
        text = self._exposition.render(snapshot, _WANT).decode()  # type: ignore[arg-type]
        page = [line for line in text.splitlines() if not line.startswith("#")]
        return [*page, "up 1", "scrape_duration_seconds 0.004", f"scrape_samples_scraped {len(page)}"]


def scrapes() -> Mapping[str, Iterable[Page]]:
    """Return the pages of every node by its name."""
    return {
        **{node.name: simulated_pages(node) for node in NODES},
        **{f"recorded-{name}": recorded_pages(name) for name in RECORDED},
    }


__all__ = ["BOOT", "NOW", "TICKS", "scrapes"]
