"""Hosts made of a recording: its devices and processes multiplied, its bytes varied, its clock ours.

Every page goes through the exporter's own history and exposition, so that series appear, change state and
disappear as they do on a real host.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import Config
from vramledger.metrics.exposition import Exposition, ScrapeRequest, select_collectors
from vramledger.model.reading import (
    DeviceReading,
    MemoryReading,
    Owner,
    ProcessEntry,
    ProcessFacts,
    Reading,
)
from vramledger.sampling.replay import read_recording

RECORDING = Path(__file__).parents[2] / "recordings" / "lively.jsonl.gz"
"""Two GPUs over two minutes in which programs work, rest, are orphaned and end."""

PERIOD = 240.0
"""Seconds over which the bytes of a holding go up and down."""


class Host:
    """One simulated host; :meth:`page` is what a scrape of it answers."""

    def __init__(self, number: int, recorded: Sequence[Reading], gpus: int = 8, holders: int = 8) -> None:
        """Build host ``number`` with ``holders`` processes on each of ``gpus`` devices."""
        self._number = number
        self._recorded = recorded
        self._gpus = gpus
        self._holders = holders
        self._chance = random.Random(number)  # noqa: S311 the same fleet every time
        self._offset = self._chance.random() * (recorded[-1].monotonic - recorded[0].monotonic)
        self._facts = {facts.pid: facts for reading in recorded for facts in reading.facts}
        self.up = True
        self.restart()
        self._exposition = Exposition(Config().processes_max, lambda: None)
        self._request = ScrapeRequest(
            select_collectors(Config(), [], []), None, openmetrics=False, compressed=True
        )

    def restart(self) -> None:
        """Start its exporter, anew: it has nothing to say on the first scrape, and remembers nothing."""
        self._told: set[tuple[int, int]] = set()
        self._tracker = HoldingTracker(idle_after=60.0, interval=15.0)
        self._starting = True

    def page(self, now: float | None = None) -> bytes:
        """Render the host as it is at a Unix time, the present one unless told otherwise; gzip."""
        if self._starting:
            self._starting = False
            return self._exposition.render(self._tracker.blank, self._request)
        when = time.time() if now is None else now
        return self._exposition.render(self._tracker.update(self._reading(when)), self._request)

    def _reading(self, now: float) -> Reading:
        first, last = self._recorded[0].monotonic, self._recorded[-1].monotonic
        at = first + (now + self._offset) % (last - first)
        source = max((each for each in self._recorded if each.monotonic <= at), key=lambda one: one.monotonic)
        rows = {row.pid: row for row in source.rows}
        devices, copies = [], []
        for index in range(self._gpus):
            model = source.devices[index % len(source.devices)]
            entries = model.processes or ()
            held = []
            for slot in range(self._holders if entries else 0):
                entry = entries[slot % len(entries)]
                pid = 100_000 + self._number % 100 * 10_000 + index * 100 + slot * 10 + slot % len(entries)
                held.append(ProcessEntry(pid, self._bytes(entry.memory, pid, now), entry.kinds))
                copies.append((pid, entry.pid))
            devices.append(self._device(model, index, tuple(held)))
        told = [facts for pid, original in copies if (facts := self._fact(pid, original)) is not None]
        return replace(
            source,
            time=now,
            monotonic=now,
            boot_id=f"{self._number:08x}",
            devices=tuple(devices),
            rows=tuple(rows[old]._replace(pid=pid) for pid, old in copies if old in rows),
            unseen={pid: source.unseen[old] for pid, old in copies if old in source.unseen},
            ended={pid: source.ended[old] for pid, old in copies if old in source.ended},
            facts=tuple(told),
            hidden=(),
            events=(),
        )

    def _bytes(self, memory: int | None, pid: int, now: float) -> int | None:
        """Return a share of what was recorded, that goes up and down by a tenth."""
        if memory is None:
            return None
        swing = abs((now / PERIOD + pid * 0.618) % 1 - 0.5) / 5
        return int(memory / self._holders * (1 + swing)) // 4096 * 4096

    def _device(self, model: DeviceReading, index: int, held: tuple[ProcessEntry, ...]) -> DeviceReading:
        memory = model.memory
        if memory is not None:
            used = sum(each.memory or 0 for each in held) + index * 2**20
            free = memory.total - (memory.reserved or 0) - used
            memory = MemoryReading(memory.total, free, used, memory.reserved)
        busy = tuple(
            sample._replace(pid=held[place].pid)
            for place, sample in enumerate(model.process_utilization or ())
            if place < len(held)
        )
        return replace(
            model,
            index=index,
            minor=index,
            uuid=f"GPU-{self._number:08x}-0000-4000-8000-{index:012x}",
            pci_bus_id=f"0000:{index + 11:02x}:00.0",
            memory=memory,
            processes=held,
            process_utilization=busy,
        )

    def _fact(self, pid: int, original: int) -> ProcessFacts | None:
        """Return what is told of a process when it is seen for the first time."""
        facts = self._facts.get(original)
        if facts is None or (pid, facts.start) in self._told:
            return None
        self._told.add((pid, facts.start))
        team = pid % 7
        owner = Owner(
            "pod",
            f"team-{team}/job-{self._number}-{pid}",
            namespace=f"team-{team}",
            pod=f"job-{self._number}-{pid}",
            container="main",
        )
        return replace(facts, pid=pid, owner=owner)


def fleet(hosts: int, gpus: int = 8, holders: int = 8) -> list[Host]:
    """Build a fleet; the same numbers give the same fleet."""
    recorded = [reading for reading in read_recording(RECORDING) if reading.failure is None]
    return [Host(number, recorded, gpus, holders) for number in range(hosts)]
