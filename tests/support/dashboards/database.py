"""A real Prometheus with hours of scrapes, and with what the shipped rules record of them.

Samples come by remote write, in order, with the marks of ended series; records and alerts by ``promtool test
rules`` over the same samples: a server evaluates rules only as time passes.
"""

import re
import struct
import urllib.request
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from math import ceil
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.support.dashboards.nodes import NOW, SCRAPE, Page
from tests.support.faults import rules
from tests.support.faults.evaluation import Manager, answers
from tests.support.fleet import engines
from tests.support.fleet.engines import Engine
from tests.support.host.model import EPOCH
from tests.support.host.series import Trace
from vramledger_agent.commands.parser import parse_duration

STEP = 60.0
"""Seconds between two evaluations of the rules."""

_ALERTS = ("ALERTS", "ALERTS_FOR_STATE")
_SAMPLE = re.compile(r'\{__name__="([^"]+)"((?:, \w+="(?:[^"\\]|\\.)*")*)\} ([^,\s"]+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
STALE = struct.pack("<Q", 0x7FF0000000000002)
"""The value that marks the end of a series: a NaN with bits of its own."""

_BATCH = 5000
"""Series in one request, which bounds its size."""

Labels = tuple[tuple[str, str], ...]
Points = dict[Labels, list[tuple[float, bytes]]]


class Samples:
    """All samples of all series, with the marks of those that ended."""

    def __init__(self) -> None:
        self.points: Points = {}
        self._last: dict[str, set[Labels]] = {}

    def add(self, source: str, at: float, values: Mapping[Labels, float]) -> None:
        """Add what a target, or the rules, gave at a moment; series that are missing now have ended."""
        for labels, value in values.items():
            self.points.setdefault(labels, []).append((at, struct.pack("<d", value)))
        for labels in self._last.get(source, set()) - values.keys():
            self.points[labels].append((at, STALE))
        self._last[source] = set(values)


def collect(nodes: Mapping[str, Iterable[Page]], scratch: Path, read: str = "") -> Samples:
    """Scrape all nodes and evaluate all rules in an empty directory, and return every sample.

    ``read`` are texts with the recorded series that are asked for; all of them when empty.
    """
    samples = Samples()
    traces = []
    for name, pages in nodes.items():
        trace = Trace(name, every=SCRAPE)
        known: dict[str, Labels] = {}  # a series is in hundreds of scrapes
        for at, lines in pages:
            trace.scraped(lines)
            values: dict[Labels, float] = {}
            for line in lines:
                series, _, value = line.rpartition(" ")
                if series not in known:
                    known[series] = _parse_series(series, name)
                values[known[series]] = float(value)
            samples.add(name, at, values)
        traces.append(trace)
    due = _recorded_at({name: every for name, every in intervals().items() if not read or name in read})
    for at, values in _evaluate_rules(traces, scratch, due):
        for interval, names in due.items():
            if at % interval == 0:
                own = {each: value for each, value in values.items() if dict(each)["__name__"] in names}
                samples.add(f"rules every {interval}", at, own)
    return samples


def _recorded_at(every: Mapping[str, float]) -> dict[float, frozenset[str]]:
    """Return the names of the series by interval: whole steps, as promtool evaluates no rule in between."""
    found = {STEP: set(_ALERTS)}
    for name, interval in every.items():
        found.setdefault(ceil(interval / STEP) * STEP, set()).add(name)
    return {interval: frozenset(names) for interval, names in found.items()}


def _parse_series(series: str, instance: str) -> Labels:
    name, _, labels = series.partition("{")
    pairs = [(key, _unescape(text)) for key, text in _LABEL.findall(labels)]
    found = [("__name__", name), ("instance", instance), ("job", "vramledger"), *pairs]
    return tuple(sorted((key, text) for key, text in found if text))


@cache  # a recorded series is in hundreds of evaluations
def _parse_labels(name: str, text: str) -> Labels:
    pairs = [(key, _unescape(each)) for key, each in _LABEL.findall(text)]
    return tuple(sorted([("__name__", name), *pairs]))


def _unescape(text: str) -> str:
    return text.replace('\\"', '"').replace("\\n", "\n").replace("\\\\", "\\")


def _evaluate_rules(
    traces: Sequence[Trace], scratch: Path, due: Mapping[float, Iterable[str]]
) -> Iterator[tuple[float, dict[Labels, float]]]:
    """Yield at each step the results of the rules that are due then, alerts included.

    Two thirds of promtool's time went into printing results, and half of these were due later.
    """
    series = (
        (name, values)
        for trace in traces
        for name, values in trace.series()
        if name.startswith(("vramledger_", "up"))
    )
    queries = []
    for at in range(round(EPOCH + STEP), int(NOW) + 1, round(STEP)):
        names = sorted(name for interval, each in due.items() if at % interval == 0 for name in each)
        queries.append((f'{{__name__=~"{"|".join(names)}"}}', at))
    manager = Manager(STEP, scrape=SCRAPE, everything=True)
    for moment, line in answers(queries, series, scratch, manager):
        yield moment, {_parse_labels(*found): float(value) for *found, value in _SAMPLE.findall(line)}


def intervals() -> dict[str, float]:
    """Return how often each series is recorded, in seconds."""
    return {
        rule["record"]: parse_duration(group["interval"])
        for path in rules.files()
        for group in rules.read_groups(path)
        for rule in group["rules"]
        if "record" in rule
    }


# --- remote write ----------------------------------------------------------------------------------


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


@cache
def _sample(at: float) -> tuple[bytes, bytes]:
    """Return the bytes before and after the value of a sample: thousands of samples share them."""
    time = b"\x10" + _varint(round(at * 1000))
    return b"\x12" + _varint(9 + len(time)) + b"\x09", time


def _request(parts: Iterable[tuple[bytes, Sequence[tuple[float, bytes]]]], ahead: float) -> bytes:
    """Return a WriteRequest of the protocol, in a snappy block that compresses nothing."""
    message = bytearray()
    for series, values in parts:
        points = [_sample(at + ahead)[0] + value + _sample(at + ahead)[1] for at, value in values]
        message += _field(1, series + b"".join(points))
    literal = struct.pack("<BI", 63 << 2, len(message) - 1)
    return _varint(len(message)) + literal + bytes(message)


def send(samples: Samples, engine: Engine, ahead: float = 0.0) -> None:
    """Write all samples, some minutes of all series after the other, shifted by some seconds."""
    if not samples.points:
        return
    span = 3000.0  # Prometheus takes what is up to an hour older than its newest sample
    begin = min(values[0][0] for values in samples.points.values())
    left = [
        (b"".join(_field(1, _field(1, k.encode()) + _field(2, v.encode())) for k, v in labels), values, 0)
        for labels, values in samples.points.items()
    ]
    while begin <= NOW:
        part, rest = [], []
        for series, values, first in left:
            end = bisect_left(values, begin + span, lo=first, key=itemgetter(0))
            if end > first:
                part.append((series, values[first:end]))
            if end < len(values):
                rest.append((series, values, end))
        left = rest
        for first in range(0, len(part), _BATCH):
            request = urllib.request.Request(  # noqa: S310 loopback
                f"{engine.url}/api/v1/write",
                data=_request(part[first : first + _BATCH], ahead),
                headers={"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf"},
            )
            urllib.request.urlopen(request, timeout=60).close()  # noqa: S310 loopback
        begin += span


@contextmanager
def prometheus(program: Path, home: Path, samples: Samples) -> Iterator[Engine]:
    with empty_prometheus(program, home) as engine:
        send(samples, engine)
        yield engine


def empty_prometheus(program: Path, home: Path) -> AbstractContextManager[Engine]:
    return engines.prometheus(program, home, {"global": {}}, "--web.enable-remote-write-receiver")


def ask(  # noqa: PLR0913 what a panel asks
    engine: Engine, expression: str, *, instant: bool, span: float, ahead: float = 0.0, step: float = 60.0
) -> list[Any]:
    """Return the series of a query as a panel would ask it at "now", over a time range; none is refused."""
    if instant:
        answer = engine.get("/api/v1/query", query=expression, time=str(NOW + ahead))
    else:
        times = {"start": str(NOW + ahead - span), "end": str(NOW + ahead), "step": str(step)}
        answer = engine.get("/api/v1/query_range", query=expression, **times)
    assert answer is not None, f"refused: {expression}"
    found: list[Any] = answer["data"]["result"]
    return found
