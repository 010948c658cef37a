"""Hosts full of holders that start, work, rest and end: their pages, by the exporter's own tracker."""

import time
from collections.abc import Iterator
from math import inf
from random import Random

from tests.support import builders
from tests.support.host.model import EPOCH, Fate, Gpu, Host, Process, Program
from tests.support.host.programs import Fixed, Held
from tests.support.host.scrapes import SCRAPE, SimulatedExporter
from vramledger.config import Config
from vramledger.metrics.exposition import Exposition, ScrapeRequest, select_collectors
from vramledger.model.reading import Owner

IDLE_AFTER = 60.0
LIFE = 3600.0
"""Seconds from the start of a holder to the start of its successor."""

PERIOD = 240.0
"""Seconds over which the bytes of a holder that works go up and down."""

FATES: tuple[Fate, ...] = ("orphaned", "stopped", "dead")
"""What happens to the holders of the first device, one each, at the end of their lives."""

LINGERS = 60.0
"""Seconds from then to the next holder: too few for a page."""


class FleetHost:
    """One simulated host; :meth:`page` is what a scrape of it answers."""

    def __init__(self, number: int, gpus: int = 8, holders: int = 8) -> None:
        """Build host ``number`` with ``holders`` processes on each of ``gpus`` devices."""
        chance = Random(number)  # noqa: S311 the same fleet every time
        self._number = number
        self._host = Host([_gpu(number, index) for index in range(gpus)], [], chance, SCRAPE)
        self._slots = [
            (index, slot, chance.random() * LIFE) for index in range(gpus) for slot in range(holders)
        ]
        self._size = self._host.gpus[0].total / 1.2 / holders
        self._lives: dict[tuple[int, int], Process] = {}
        self._exporter = SimulatedExporter(self._host, IDLE_AFTER)
        self._starting = True
        self._exposition = Exposition(Config().processes_max, lambda: None)
        self._request = ScrapeRequest(
            select_collectors(Config(), [], []), None, openmetrics=False, compressed=True
        )

    def page(self, now: float | None = None) -> bytes:
        """Render the host as it is at a Unix time, the present one unless told otherwise; gzip."""
        if self._starting:
            self._starting = False
            return self._exposition.render(self._exporter.tracker.blank, self._request)
        moment = (time.time() if now is None else now) - EPOCH
        self._host.processes = list(self._holders(moment))
        return self._exposition.render(self._exporter.sample(moment), self._request)

    def _holders(self, now: float) -> Iterator[Process]:
        """Yield the holders; each successor starts when the life of the one before is over."""
        for index, slot, phase in self._slots:
            life, age = divmod(now + phase, LIFE)
            process = self._lives.get((index, slot))
            if process is None or process.begin != now - age:
                pid = 100_000 + self._number % 100 * 10_000 + index * 100 + slot * 10 + int(life) % 10
                process = self._lives[index, slot] = self._process(pid, index, slot, begin=now - age)
            yield process

    def _process(self, pid: int, index: int, slot: int, begin: float) -> Process:
        team, job = f"team-{pid % 7}", f"job-{self._number}-{pid}"
        works = slot % 3 != 0

        def up_and_down(age: float) -> float:
            """Need up to a tenth more than the size."""
            return self._size * (1 + abs((age / PERIOD + pid * 0.618) % 1 - 0.5) / 5)

        program: Program = Held(up_and_down) if works else Fixed(int(self._size))
        return Process(
            pid,
            {index: program},
            begin=begin,
            owner=Owner("pod", f"{team}/{job}", namespace=team, pod=job, container="main"),
            signs=("multiprocessing",),
            fates={FATES[slot]: begin + LIFE - LINGERS} if index == 0 and slot < len(FATES) else {},
        )


def _gpu(number: int, index: int) -> Gpu:
    uuid = f"GPU-{number:08x}-0000-4000-8000-{index:012x}"
    return Gpu(
        index, unowned=lambda _: index * 2**20, uuids=((-inf, uuid),), sensors=lambda _: builders.HARDWARE
    )


def fleet(hosts: int, gpus: int = 8, holders: int = 8) -> list[FleetHost]:
    """Build a fleet; the same numbers give the same fleet."""
    return [FleetHost(number, gpus, holders) for number in range(hosts)]
