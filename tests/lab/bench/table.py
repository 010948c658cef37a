"""The figures as a table, and whether a limit was exceeded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    at: str  # GPUs x holders on each
    what: str  # what was measured
    ours: float
    other: float | None = None  # what it is compared with, None when it stands for itself
    unit: str = ""  # of both figures, one that :func:`_shown` knows
    bar: float | None = None  # the most that is allowed: of ``ours / other`` where there is one, else of ours
    against: str = "nvitop-exporter"  # what ``other`` is

    @property
    def ratio(self) -> float | None:
        return self.ours / self.other if self.other else None

    @property
    def met(self) -> bool | None:
        """Whether the limit is kept, None if there is none."""
        if self.bar is None:
            return None
        return (self.ours if self.ratio is None else self.ratio) <= self.bar


_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        return next(f"{value / size:.1f} {name}" for name, size in _TIMES if value >= size or name == "µs")
    if unit == "CPU":
        return f"{value * 1e3:.1f} ms/s"
    if unit == "B":
        return f"{value / 2**20:.1f} MiB" if value >= 2**20 else f"{value / 1000:.1f} kB"
    return f"{value:.0f}{unit}"


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    yield "| GPUs x holders | measured | vramledger | compared with | ratio | bar | |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        other = "" if row.other is None else f"{_shown(row.other, row.unit)} ({row.against})"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        bar = ""
        if row.bar is not None:
            bar = f"≤ {row.bar:g} times" if row.other is not None else f"≤ {_shown(row.bar, row.unit)}"
        verdict = {None: "", True: "met", False: "**missed**"}[row.met]
        cells = (row.at, row.what, _shown(row.ours, row.unit), other, ratio, bar, verdict)
        yield f"| {' | '.join(cells)} |"
