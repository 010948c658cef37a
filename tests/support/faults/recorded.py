"""Recordings of real GPUs, played to the rules: with the clock stretched, and the last moment held.

A recording of some seconds shows a situation; that nothing changes in it for an hour afterwards is then
assumed. One of minutes, in which programs were made to err quickly, becomes hours by stretching.
"""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tests.support.faults.reports import labelled
from tests.support.host.model import EPOCH
from tests.support.host.scrapes import SCRAPE, Page, Trace
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import IDLE_AFTER
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import read_recording, shift_times

FAULTS = "faults"
"""The recording in which real programs err within minutes."""

STRETCH = 30.0
"""How many hours an hour of that recording stands for."""

Notes = Mapping[int, Mapping[str, float]]
"""What programs said of their allocators: figures by family name without prefix, by pid."""


def play(
    path: Path, names: Collection[str], *, instance: str, stretch: float = 1.0, hold: float = 0.0
) -> Trace:
    """Return what Prometheus would have scraped while a recording was played.

    Args:
        path: of the recording; ``NAME.notes.gz`` beside it may hold what its programs said.
        names: the families that anybody will ask for.
        instance: label of the target.
        stretch: by how much its time is drawn out.
        hold: seconds for which its last reading goes on afterwards.
    """
    trace, page = Trace(instance, names), Page(names)
    notes = _Notes(path.with_name(path.name.removesuffix(".jsonl.gz") + ".notes.gz"))
    scrape = 0.0
    snapshot: Snapshot | None = None
    said: Notes = {}
    for now, recorded, snapshot in _lived(path, stretch, hold):
        said = notes.until(recorded)
        while scrape <= now:
            own = [
                f"{series} {value!r}"
                for series, value in labelled(snapshot, said, EPOCH + now)
                if page.wants(series)
            ]
            trace.scraped([*page.lines(snapshot), *own])
            scrape += SCRAPE
    return trace


def _lived(path: Path, stretch: float, hold: float) -> Iterator[tuple[float, float, Snapshot]]:
    """Yield (seconds since the beginning, recorded Unix time, snapshot) of every sample."""
    readings = list(read_recording(path))
    first = readings[0]
    gaps = [after.time - before.time for before, after in itertools.pairwise(readings)]
    usual = sorted(gaps)[len(gaps) // 2] * stretch if gaps else SCRAPE
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=max(usual, SCRAPE))
    now = 0.0
    for reading in readings:
        now = (reading.time - first.time) * stretch
        yield now, reading.time, tracker.update(_at(reading, now))
    last = replace(readings[-1], facts=(), events=())
    for _ in range(int(hold // SCRAPE)):
        now += SCRAPE
        yield now, readings[-1].time, tracker.update(_at(last, now))


def _at(reading: Reading, now: float) -> Reading:
    """Return a reading as of a moment of the simulation, every clock in it moved together."""
    there = shift_times(reading, EPOCH + now - reading.time)
    return replace(there, monotonic=now, duration=0.01)


class _Notes:
    """What the programs wrote down beside a recording, in the order of time."""

    def __init__(self, path: Path) -> None:
        lines = gzip.decompress(path.read_bytes()).splitlines() if path.exists() else []
        self._left = sorted((json.loads(line) for line in lines), key=lambda each: float(each["time"]))
        self._newest: dict[int, Mapping[str, float]] = {}

    def until(self, moment: float) -> Notes:
        """Return what every program had said last at a moment, Unix seconds of the recording."""
        while self._left and self._left[0]["time"] <= moment:
            note = self._left.pop(0)
            self._newest[int(note["pid"])] = note["figures"]
        return self._newest
