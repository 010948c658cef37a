"""Recordings of real GPUs, evaluated by the rules: stretched in time, and held at the last moment."""

import gzip
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from tests.support.host.agents import Around, Failures, report_of
from tests.support.host.model import EPOCH
from tests.support.host.scrapes import SCRAPE, Renderer
from tests.support.host.series import Trace
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import IDLE_AFTER
from vramledger.model.agent_report import Agent
from vramledger.model.reading import DeviceReading, Reading
from vramledger.sampling.replay import read_recording, shift_times

FAULTS = "faults"
"""The recording with real faulty programs, minutes long."""

_HOPPER = re.compile(r"\bH[12]00\b")

STRETCH = 30.0
"""The number of hours that one hour of that recording represents."""


def play(
    path: Path, names: Collection[str], trace: Trace, *, stretch: float = 1.0, hold: float = 0.0
) -> Trace:
    """Fill an empty trace with what Prometheus would have scraped of a recording, and return it.

    ``NAME.notes.gz`` beside it may hold what its programs said. Its time is drawn out by ``stretch``, and its
    last reading goes on for so many seconds (``hold``). ``names`` are the families that anybody will ask for.
    """
    for lines in recorded_scrapes(path, Renderer(names), stretch, hold, trace.every):
        trace.scraped(lines)
    return trace


def recorded_scrapes(
    path: Path, renderer: Renderer, stretch: float, hold: float, every: float = SCRAPE
) -> Iterator[list[str]]:
    """Yield the lines of every scrape while a recording is played, as :func:`play` has it."""
    readings = list(read_recording(path))
    first = readings[0]
    gaps = [after.time - before.time for before, after in itertools.pairwise(readings)]
    usual = sorted(gaps)[len(gaps) // 2] * stretch if gaps else every
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=max(usual, every))
    notes = _Notes(path.with_name(path.name.removesuffix(".jsonl.gz") + ".notes.gz"))
    last = replace(readings[-1], facts=(), events=())
    end = (last.time - first.time) * stretch
    moments = [(each, (each.time - first.time) * stretch) for each in readings]
    moments += [(last, end + number * every) for number in range(1, int(hold // every) + 1)]
    # The host boots once: a boot time that changes would be a clock that is set.
    boot_time = first.boot_time + EPOCH - first.time
    scrape = 0.0
    for recorded, now in moments:
        reading = notes.with_agents(recorded)
        reading = replace(reading, devices=tuple(_with_counters(each) for each in reading.devices))
        shifted = shift_times(reading, EPOCH + now - reading.time)
        there = replace(shifted, monotonic=now, duration=0.01, boot_time=boot_time)
        if now > end:
            there = replace(there, agents=tuple(_failed_before(each, now - end) for each in there.agents))
        snapshot = tracker.update(there)
        while scrape <= now:
            yield renderer.lines(snapshot)
            scrape += every


def _with_counters(device: DeviceReading) -> DeviceReading:
    """Return a device with the counters that Hopper GPUs have, if it was recorded before they were read.

    They say that kernels ran where the driver's own utilisation says so, and that none ran otherwise.
    """
    if device.activity is not None or device.utilization is None or not _HOPPER.search(device.name or ""):
        return device
    shares = [device.utilization.get("gpu", 0.0), *(row.sm for row in device.process_utilization or ())]
    return replace(device, activity={"seconds": 1.0, "graphics": 6e-5, "sm": max(shares), "dram": 6e-6})


def _failed_before(agent: Agent, seconds: float) -> Agent:
    """Return an agent whose last failed allocation does not move with the reading that goes on."""
    report = agent.report
    if report is None or report.last_oom is None:
        return agent
    failure = replace(report.last_oom, time=report.last_oom.time - seconds)
    return agent._replace(report=replace(report, last_oom=failure))


def _around(reading: Reading, pid: int) -> dict[str, Around]:
    """Return what is free on each device, and what others than a process hold there."""
    return {
        device.uuid: Around(
            device.memory.total,
            device.memory.free,
            sum(entry.memory or 0 for entry in device.processes or () if entry.pid != pid),
        )
        for device in reading.devices
        if device.memory is not None
    }


class _Notes:
    """The programs' notes about their allocators, in the order of time."""

    def __init__(self, path: Path) -> None:
        lines = gzip.decompress(path.read_bytes()).splitlines() if path.exists() else []
        self._left = sorted((json.loads(line) for line in lines), key=lambda each: float(each["time"]))
        self._newest: dict[int, Mapping[str, int]] = {}
        self._begun: dict[int, float] = {}
        self._uids: dict[int, int] = {}
        self._failures = Failures()

    def with_agents(self, reading: Reading) -> Reading:
        """Return a reading with the agents that the programs would have had: they repeat their notes."""
        self._uids |= {facts.pid: facts.uid for facts in reading.facts if facts.uid is not None}
        while self._left and self._left[0]["time"] <= reading.time:
            note = self._left.pop(0)
            self._newest[int(note["pid"])] = {
                name.removeprefix("torch_").removesuffix("_bytes").removesuffix("_total"): int(value)
                for name, value in note["figures"].items()
            }
            self._begun.setdefault(int(note["pid"]), float(note["time"]))
        return replace(reading, agents=(*reading.agents, *self._agents(reading)))

    def _agents(self, reading: Reading) -> Iterator[Agent]:
        starts = {row.pid: row.start for row in reading.rows}
        held = {entry.pid: device.uuid for device in reading.devices for entry in device.processes or ()}
        for pid in self._newest.keys() & held.keys() & starts.keys():
            age = reading.time - self._begun[pid]
            pools = {held[pid]: {"torch": self._newest[pid]}}
            newest = self._failures.newest(pid, pools, _around(reading, pid), reading.time)
            report = report_of(pools, age, newest)
            yield Agent(pid, starts[pid], self._uids.get(pid, 0), reading.time, "", report)
