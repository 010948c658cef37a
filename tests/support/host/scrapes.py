"""From a simulated or recorded host to what Prometheus would have scraped of it, in compressed time.

The readings go through the real history, metrics and exposition; every page is taken at its simulated time
and kept as series in the notation of promtool's rule tests. A series that a scrape no longer has, or that a
failed scrape ends, gets the mark that a real Prometheus would write.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from random import Random

from tests.support.faults import reports
from tests.support.host.model import EPOCH, Host
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import COLLECTORS, IDLE_AFTER
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.snapshot import Snapshot

SCRAPE = 15.0
NEARLY_FULL = 0.9
_COLLECTORS = frozenset(COLLECTORS) - {"exporter"}


@dataclass(slots=True)
class Weather:
    """What happens between an exporter and Prometheus; times are seconds after the beginning.

    Attributes:
        missing: share of the scrapes that fail, alone or a few in a row.
        down: spans in which nothing answers.
        restarts: when the exporter is started anew, with nothing remembered.
        stalled: from when on it answers with the sample that it has, for ever.
        unknown: from when on Prometheus has no such target.
        most: holders of a device that the exporter shows one by one (``--processes.max``).
    """

    missing: float = 0.0
    down: tuple[tuple[float, float], ...] = ()
    restarts: tuple[float, ...] = ()
    stalled: float = inf
    unknown: float = inf
    most: int = 100


class Values:
    """The values of one series, a scrape each, as promtool notes them: ``5+0x3`` is four times 5."""

    __slots__ = ("_next", "_parts", "_run", "_value")

    def __init__(self, slot: int) -> None:
        self._parts = [f"_x{slot}"] if slot else []
        self._next = slot
        self._value = ""
        self._run = 0

    def note(self, slot: int, value: str) -> None:
        """Take in the value of a scrape; scrapes since the last one had none."""
        if slot > self._next:
            self._end(slot)
        if value == self._value:
            self._run += 1
        else:
            self._flush()
            self._value, self._run = value, 1
        self._next = slot + 1

    def text(self, slots: int) -> str:
        """Return the notation of the first so many scrapes."""
        if slots > self._next:
            self._end(slots)
        self._flush()
        return " ".join(self._parts)

    def _end(self, slot: int) -> None:
        self._flush()
        self._parts.append("stale")
        if slot - self._next > 1:
            self._parts.append(f"_x{slot - self._next - 1}")
        self._next = slot

    def _flush(self) -> None:
        if self._run == 1:
            self._parts.append(self._value)
        elif self._run:
            self._parts.append(f"{self._value}+0x{self._run - 1}")
        self._value, self._run = "", 0


@dataclass(slots=True)
class Trace:
    """One host's scrapes.

    Attributes:
        instance: label of the target.
        names: the families that anybody will ask for.
        job: label of the target.
        slots: scrapes so far, those before the beginning included.
        full: seconds after which a card was first full to nine tenths.
    """

    instance: str
    names: Collection[str]
    job: str = "vramledger"
    slots: int = int(EPOCH / SCRAPE)
    full: float | None = None
    _series: dict[str, Values] = field(default_factory=dict)

    def live(self, host: Host, hours: float, weather: Weather, random: Random) -> None:
        """Live through some hours of a simulated host."""
        for now, snapshot, lines in self._pages(host, hours, weather, random):
            self.scraped(lines)
            if self.full is None and snapshot is not None and _fullest(snapshot) >= NEARLY_FULL:
                self.full = now

    def scraped(self, lines: Iterable[str]) -> None:
        """Take in one scrape: lines of a series and its value; a failed one has ``up 0`` alone."""
        slot, known = self.slots, self._series
        for line in lines:
            series, _, value = line.rpartition(" ")
            values = known.get(series)
            if values is None:
                values = known[series] = Values(slot)
            values.note(slot, value)
        self.slots = slot + 1

    def series(self) -> Iterator[tuple[str, str]]:
        """Yield each series with the labels of its target, and its values in promtool's notation."""
        for series, values in self._series.items():
            yield self._labelled(series), values.text(self.slots)

    def _labelled(self, series: str) -> str:
        target = f'instance="{self.instance}",job="{self.job}"'
        name, brace, labels = series.partition("{")
        return f"{name}{{{target},{labels}" if brace else f"{name}{{{target}}}"

    def _pages(
        self, host: Host, hours: float, weather: Weather, random: Random
    ) -> Iterator[tuple[float, Snapshot | None, list[str]]]:
        """Yield (time, snapshot, lines) a scrape; one that failed has no snapshot."""
        page = Page(self.names, weather.most)
        tracker = _tracker(host)
        restarts = sorted(weather.restarts)
        snapshot: Snapshot | None = None
        scrape, now, missing = 0.0, 0.0, 0
        while now < hours * 3600:
            if restarts and now >= restarts[0]:
                restarts.pop(0)
                host.restart()
                tracker = _tracker(host)
            if snapshot is None or now < weather.stalled:
                snapshot = tracker.update(host.reading(now))
            taken, now = now, now + host.interval
            while scrape < now:
                at, scrape = scrape, scrape + SCRAPE
                if missing > 0:
                    missing -= 1
                elif random.random() < weather.missing:
                    missing = random.randint(1, 3)
                if at >= weather.unknown:
                    yield at, None, []
                    continue
                if missing > 0 or any(since <= at < until for since, until in weather.down):
                    yield at, None, ["up 0"]
                    continue
                agents = reports.series(host, taken) if snapshot.up else ()
                own = [f"{series} {value!r}" for series, value in agents if page.wants(series)]
                yield at, snapshot, [*page.lines(snapshot), *own]


class Page:
    """Renders snapshots as the exporter does, but only the families that somebody asks for."""

    def __init__(self, names: Collection[str], most: int = 100) -> None:
        self._names = frozenset(names)
        self._want = ScrapeRequest(_COLLECTORS, self._names)
        self._exposition = Exposition(most, lambda: None, clock=lambda: 0.0)

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return the lines of a scrape that succeeded, with the ``up`` that Prometheus adds."""
        page = self._exposition.render(snapshot, self._want).decode()
        return ["up 1", *(line for line in page.splitlines() if not line.startswith("#"))]

    def wants(self, series: str) -> bool:
        """Tell whether anybody asks for a series."""
        return series.partition("{")[0] in self._names


def _tracker(host: Host) -> HoldingTracker:
    return HoldingTracker(idle_after=IDLE_AFTER, interval=host.interval)


def _fullest(snapshot: Snapshot) -> float:
    ledgers = [device.ledger for device in snapshot.devices if device.ledger is not None]
    return max(((ledger.total - ledger.free) / ledger.total for ledger in ledgers), default=0.0)
