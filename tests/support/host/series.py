"""What Prometheus would have scraped of a host, with its marks, in the notation of promtool's rule tests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tests.support.host.model import EPOCH
from tests.support.host.scrapes import SCRAPE


class Values:
    """The values of one series, a scrape each, in promtool's notation: ``5+0x3`` is four times 5."""

    __slots__ = ("_next", "_parts", "_run", "_value")

    def __init__(self, slot: int) -> None:
        self._parts = [f"_x{slot}"] if slot else []
        self._next = slot
        self._value = ""
        self._run = 0

    def note(self, slot: int, value: str) -> None:
        """Add the value of a scrape; scrapes since the last one had none."""
        if slot > self._next:
            self._end(slot)
        if value == self._value:
            self._run += 1
        else:
            self._flush()
            self._value, self._run = value, 1
        self._next = slot + 1

    def text(self, slots: int) -> str:
        """Return the notation of the first scrapes, up to this number."""
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
    instance: str  # label of the target
    job: str = "vramledger"  # label of the target
    every: float = SCRAPE  # seconds from one scrape to the next
    slots: int = field(init=False)  # scrapes so far, those before the beginning included
    _series: dict[str, Values] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = int(EPOCH / self.every)

    def scraped(self, lines: Iterable[str]) -> None:
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
