"""Prometheus' scrapes of a simulated host, in compressed time.

The readings go through the real tracker, metrics and exposition; every page is taken at its simulated time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

from tests.support.host.model import Host
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import COLLECTORS, IDLE_AFTER
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Collected
from vramledger.model.snapshot import Snapshot

SCRAPE = 15.0
"""Seconds from one scrape to the next, unless told otherwise."""


@dataclass(slots=True)
class Weather:
    """What happens between an exporter and Prometheus; times are seconds after the beginning."""

    missing: float = 0.0  # share of the scrapes that fail, alone or a few in a row
    down: tuple[tuple[float, float], ...] = ()  # spans in which nothing answers
    restarts: tuple[float, ...] = ()  # when the exporter is started again, with nothing remembered
    stalled: float = inf  # from when on it answers with the sample that it has, for ever
    unknown: float = inf  # from when on Prometheus has no such target
    most: int = 100  # holders of a device that the exporter shows one by one (``--processes.max``)
    every: float = SCRAPE  # seconds from one scrape to the next
    # name and labels of series that differ from the page, with a value for each moment, None for none
    says: Mapping[str, Callable[[float], float | None]] = field(default_factory=dict)

    def lines(self, page: list[str], now: float) -> list[str]:
        if not self.says:
            return page
        values = {series: value(now) for series, value in self.says.items()}
        kept = [line for line in page if line.rpartition(" ")[0] not in values]
        return [*kept, *(f"{series} {value:g}" for series, value in values.items() if value is not None)]


class Renderer:
    """Renders snapshots as the exporter does, with what Prometheus adds to a scrape.

    ``names`` are the families that somebody asks for; None for all, the exporter's own included.
    """

    def __init__(
        self,
        names: Collection[str] | None = None,
        most: int = 100,
        collect_own: Callable[[], Collected] = list,
    ) -> None:
        self._names = None if names is None else frozenset(names)
        own = set() if names is None else {"exporter"}
        self._request = ScrapeRequest(frozenset(COLLECTORS) - own, self._names)
        self._exposition = Exposition(most, lambda: None, clock=lambda: 0.0, collect_own=collect_own)

    def lines(self, snapshot: Snapshot) -> list[str]:
        """Return the lines of a scrape that succeeded: a series and its value each."""
        text = self._exposition.render(snapshot, self._request).decode()
        page = [line for line in text.splitlines() if not line.startswith("#")]
        if self._names is not None:
            return ["up 1", *page]
        return [*page, "up 1", "scrape_duration_seconds 0.004", f"scrape_samples_scraped {len(page)}"]


class SimulatedExporter:
    """The exporter on a simulated host: readings in, snapshots out, without a process and a port."""

    def __init__(self, host: Host, idle_after: float = IDLE_AFTER, told_after: float = 0.0) -> None:
        self._told_after = told_after
        self.host = host
        self._idle_after = idle_after
        self.restart()

    def restart(self) -> None:
        """Start it again: it forgets everything, and gets all facts again."""
        self.host.restart()
        self.tracker = HoldingTracker(
            idle_after=self._idle_after, interval=self.host.interval, told_after=self._told_after
        )

    def sample(self, now: float, **changes: Any) -> Snapshot:  # noqa: ANN401 any field of a reading
        return self.tracker.update(self.host.reading(now, **changes))


def scrapes(
    host: Host, hours: float, weather: Weather, random: Random, renderer: Renderer
) -> Iterator[tuple[float, Snapshot | None, list[str]]]:
    """Yield (seconds since the beginning, snapshot, lines) a scrape; one that failed has no snapshot."""
    exporter = SimulatedExporter(host)
    restarts = sorted(weather.restarts)
    snapshot: Snapshot | None = None
    scrape, now, missing = 0.0, 0.0, 0
    while now < hours * 3600:
        if restarts and now >= restarts[0]:
            restarts.pop(0)
            exporter.restart()
        if snapshot is None or now < weather.stalled:
            snapshot = exporter.sample(now)
        now += host.interval
        while scrape < now:
            at, scrape = scrape, scrape + weather.every
            if missing > 0:
                missing -= 1
            elif random.random() < weather.missing:
                missing = random.randint(1, 3)
            if at >= weather.unknown:
                yield at, None, []
            elif missing > 0 or any(since <= at < until for since, until in weather.down):
                yield at, None, ["up 0"]
            else:
                yield at, snapshot, weather.lines(renderer.lines(snapshot), at)
