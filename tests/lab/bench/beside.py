"""What do we cost beside nvitop-exporter, on the same driver with the same holders, scraped each second?

The two take turns, so that a machine that slows down does so for both.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.lab.bench import cost
from tests.lab.bench.programs import Page, Program, running
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row

WARM_UP = 16.0
"""Seconds before the first figure: both read more of every holder when they first see it, and a GPU that goes
on with what it does is sampled less often after ten."""

_CPU_MOST, _SCRAPE_MOST = 0.1, 0.08
"""Shares of the peer's: 0.07 and 0.04 were measured. They may only fall."""
_MEMORY_MOST = 84 * 2**20
"""The process that starts samplers included: 82.8 MiB were measured with Python 3.11. It may only fall."""


@dataclass
class Figures:
    """The results of one program's turns."""

    cpu: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    page: Page | None = None


def _turn(program: Program, seconds: int, figures: Figures) -> None:
    time.sleep(WARM_UP)
    program.scrape()
    begun = time.monotonic()
    with cost.cpu_share(program.pid) as share:
        for number in range(1, seconds + 1):
            time.sleep(max(0.0, begun + number - time.monotonic()))
            figures.page = program.scrape()
            figures.seconds.append(figures.page.seconds)
    figures.cpu += share
    figures.rss.append(cost.rss(program.pid))


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    """Yield the figures; only 8 GPUs with 64 holders each have limits."""
    figures = {"ours": Figures(), "peer": Figures()}
    for _ in range(turns):
        for which, each in figures.items():
            with running(scene, which) as program:
                _turn(program, seconds, each)
    ours, peer = figures["ours"], figures["peer"]
    if ours.page is None or peer.page is None:
        return
    at = scene.name
    judged = at == "8x64"
    cpu_most, scrape_most = (_CPU_MOST, _SCRAPE_MOST) if judged else (None, None)
    yield Row(at, "CPU", statistics.median(ours.cpu), statistics.median(peer.cpu), "CPU", cpu_most)
    medians = statistics.median(ours.seconds), statistics.median(peer.seconds)
    yield Row(at, f"scrape, median of {len(ours.seconds)}", *medians, "s", scrape_most)
    yield Row(at, "series", ours.page.series, peer.page.series)
    rss = max(ours.rss)
    if judged:  # its limit is absolute
        yield Row(at, "RSS of all our processes", rss, unit="B", bar=_MEMORY_MOST)
    yield Row(at, "RSS", rss, max(peer.rss), "B")
