"""Turn families into the page that a scrape gets: text 0.0.4 or OpenMetrics 1.0.0, filtered, compressed.

prometheus_client's encoder takes 8 µs a sample, most of it for the labels. So ours keeps the text before the
value of each series, and writes the same bytes, which a test checks. This module knows two HTTP headers and
nothing else of HTTP.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from math import isfinite
from typing import NamedTuple, TypeVar

from prometheus_client import PlatformCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from vramledger.config import ALWAYS_COLLECTED, Config
from vramledger.errors import UsageError
from vramledger.logs import COLLECTOR_FAILED, FailureStreaks
from vramledger.metrics import sampling
from vramledger.metrics.contract import collectors
from vramledger.metrics.families import Collected, Family, Labels, Sample
from vramledger.model.records import label_text
from vramledger.model.snapshot import Snapshot
from vramledger.readers.hosts.own_process import OwnProcess

_HELP = {
    "cpu_seconds_total": "Total user and system CPU time spent in seconds.",
    "max_fds": "Maximum number of open file descriptors.",
    "open_fds": "Number of open file descriptors.",
    "resident_memory_bytes": "Resident memory size in bytes.",
    "start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "virtual_memory_bytes": "Virtual memory size in bytes.",
}


def _families(prefix: str) -> dict[str, Family]:
    return {
        name: Family(f"{prefix}process_{name}", (), text, "exporter", "`/proc`", "never")
        for name, text in _HELP.items()
    }


_OUR_FAMILIES, _SAMPLER_FAMILIES = _families(""), _families("vramledger_sampler_")


class OwnProcesses:
    """The exporter's process, and its sampler's while there is one.

    prometheus_client's ProcessCollector makes each family at each scrape, which took 0.4 ms.
    """

    def __init__(self, sampler_pid: Callable[[], int | None]) -> None:
        self._sampler_pid = sampler_pid
        self._exporter = OwnProcess()
        self._sampler: OwnProcess | None = None

    def collect(self) -> Collected:
        """Return the families of both; what cannot be read of a process is not there."""
        found = _with_values(_OUR_FAMILIES, self._exporter.read())
        pid = self._sampler_pid()
        if pid is None:
            self._sampler = None
            return found
        if self._sampler is None or self._sampler.pid != pid:
            self._sampler = OwnProcess(pid)
        return found + _with_values(_SAMPLER_FAMILIES, self._sampler.read())


def _with_values(families: dict[str, Family], figures: dict[str, float]) -> Collected:
    return [(families[name], [((), value)]) for name, value in figures.items()]


_COMPRESSION = 1
"""8 GPUs with 64 holders each: level 1 makes 458 kB into 30 kB in 0.6 ms, level 6 into 27 kB in 1.8 ms."""

_GZIP = 31
"""zlib's window bits for a gzip header."""

_Result = TypeVar("_Result")

_EXPORTER = "exporter"
_PYTHON = ("python_info", "python")
_EOF = b"# EOF\n"


class ScrapeRequest(NamedTuple):
    """What one scrape requests: ``collectors``, and family or sample ``names`` to keep, None for all."""

    collectors: frozenset[str]
    names: frozenset[str] | None = None
    openmetrics: bool = False
    compressed: bool = False


_Lines = dict[Labels, tuple[float, str]]
"""The value and the line of each sample of a family."""


class Exposition:
    """Render snapshots, and remember the series of the newest one.

    ``collect``: the collectors to run by name, instead of those of the contract. ``collect_own``: gives the
    families of the exporter itself: its access rules, its storage.
    """

    def __init__(
        self,
        most: int,
        sampler_pid: Callable[[], int | None],
        clock: Callable[[], float] = time.perf_counter,
        collect: Mapping[str, Callable[[Snapshot], Collected]] | None = None,
        collect_own: Callable[[], Collected] = list,
    ) -> None:
        self._collect = collectors(most) if collect is None else collect
        self._clock = clock
        self._lines: dict[str, _Lines] = {}  # by name: a family's hash takes longer
        self._headers: dict[tuple[str, bool], bytes] = {}
        self._collect_own = collect_own
        self._own = OwnProcesses(sampler_pid)
        self._failing = FailureStreaks(COLLECTOR_FAILED)
        self._lock = threading.Lock()
        self._newest: tuple[Snapshot, ScrapeRequest, bytes] | None = None

    def render(self, snapshot: Snapshot, request: ScrapeRequest) -> bytes:
        """Write the page; when a collector raises, only its own families are missing."""
        with self._lock:
            health: dict[str, tuple[bool, float]] = {}
            own = b""
            if _EXPORTER in request.collectors:
                own = self._run(_EXPORTER, lambda: self._render_own(request), health) or b""
            page = [self._snapshot_page(snapshot, request, health), own]
        if request.openmetrics:
            page.append(_EOF)
        if not request.compressed:
            return b"".join(page)
        # In parts: one more copy of the page would be the largest object that we hold.
        compressor = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, _GZIP)
        return b"".join([*map(compressor.compress, page), compressor.flush()])

    def _snapshot_page(
        self, snapshot: Snapshot, request: ScrapeRequest, health: dict[str, tuple[bool, float]]
    ) -> bytes:
        """Return the text of a snapshot, made once; a calm host has a new one every 5 s.

        If a collector fails, nothing is kept.
        """
        asked = request._replace(compressed=False)
        if (
            all(_successes(health))
            and self._newest
            and self._newest[0] is snapshot
            and self._newest[1] == asked
        ):
            return self._newest[2]
        page = b"".join(self._render_snapshot(snapshot, request, health))
        self._newest = (snapshot, asked, page) if all(_successes(health)) else None
        return page

    def _render_snapshot(
        self, snapshot: Snapshot, request: ScrapeRequest, health: dict[str, tuple[bool, float]]
    ) -> list[bytes]:
        """Return the text family by family; the whole page is the largest object that we ever hold."""
        blocks: list[tuple[str, bytes]] = []
        for name in sorted(request.collectors - {_EXPORTER}):
            collect = self._collect[name]
            encode = partial(lambda collect: self._encode(collect(snapshot), request), collect)
            blocks += self._run(name, encode, health) or []
            read, seconds = snapshot.collectors.get(name, (True, None))
            if seconds is not None:
                health[name] = read and health[name][0], seconds
            if not snapshot.up:
                del health[name]  # it had nothing to do, and only vramledger_up reports that
        always = snapshot.collectors.keys() & ALWAYS_COLLECTED.keys() if snapshot.up else ()
        health |= {name: snapshot.collectors[name] for name in sorted(always)}
        blocks += self._encode(sampling.collect(snapshot, health), request)
        return [text for _, text in sorted(blocks)]

    def _render_own(self, request: ScrapeRequest) -> bytes:
        blocks = self._encode(self._collect_own() + self._own.collect(), request)
        if request.names is None or not request.names.isdisjoint(_PYTHON):
            blocks.append((_PYTHON[0], _about_python(openmetrics=request.openmetrics)))
        return b"".join([text for _, text in sorted(blocks)])

    def _run(
        self, name: str, collect: Callable[[], _Result], health: dict[str, tuple[bool, float]]
    ) -> _Result | None:
        """Return what a collector gives, None if it raises; record in ``health`` how it went."""
        started = self._clock()
        try:
            result = collect()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other collectors are served
            self._failing.failed(name, error)
            health[name] = False, self._clock() - started
            return None
        self._failing.succeeded(name)
        health[name] = True, self._clock() - started
        return result

    def _header(self, family: Family, *, openmetrics: bool) -> bytes:
        """Return the lines before a family's samples, made once: they took a fifth of a small page."""
        header = self._headers.get((family.name, openmetrics))
        if header is None:
            header = _header(family, openmetrics=openmetrics).encode()
            self._headers[family.name, openmetrics] = header
        return header

    def _encode(self, collected: Collected, request: ScrapeRequest) -> list[tuple[str, bytes]]:
        blocks = []
        for family, samples in collected:
            if request.names is not None and request.names.isdisjoint((family.name, family.base)):
                continue
            text, self._lines[family.name] = _write(family, samples, self._lines.get(family.name, {}))
            if text:
                header = self._header(family, openmetrics=request.openmetrics)
                blocks.append((family.name, header + text.encode()))
        return blocks


def _successes(health: Mapping[str, tuple[bool, float]]) -> Iterator[bool]:
    return (succeeded for succeeded, _ in health.values())


def _write(family: Family, samples: list[Sample], known: _Lines) -> tuple[str, _Lines]:
    """Return a family's text, and its lines. A duplicate's last sample counts; NaN is left out.

    Most values are those of the page before, and keep their line: this halves the time of a page.
    """
    lines: _Lines = {}
    for labels, value in samples:
        if isfinite(value):
            line = known.get(labels)
            if line is None or line[0] != value:
                start = _series(family, labels) if line is None else line[1].rpartition(" ")[0]
                line = value, f"{start} {format_number(value)}\n"
            lines[labels] = line
    return "".join([text for _, text in lines.values()]), lines


def _series(family: Family, labels: Labels) -> str:
    if not labels and not family.labels:
        return family.name
    pairs = [
        f'{name}="{label_value(value)}"' for name, value in sorted(zip(family.labels, labels, strict=True))
    ]
    return f"{family.name}{{{','.join(pairs)}}}"


def label_value(value: str) -> str:
    """Escape a label value, cut it to the maximum length, and replace what UTF-8 cannot encode."""
    return label_text(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def format_number(value: float) -> str:
    """Write a finite number as Go's client and prometheus_client do."""
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6:  # noqa: PLR2004 - Go switches to exponents at 1e+06
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def _header(family: Family, *, openmetrics: bool) -> str:
    about = family.help.replace("\\", r"\\").replace("\n", r"\n")
    if not openmetrics:
        kind = "gauge" if family.kind == "info" else family.kind
        return f"# HELP {family.name} {about}\n# TYPE {family.name} {kind}\n"
    quoted = about.replace('"', r"\"")
    unit = f"# UNIT {family.base} {family.unit}\n" if family.unit else ""
    return f"# HELP {family.base} {quoted}\n# TYPE {family.base} {family.kind}\n{unit}"


@lru_cache(maxsize=2)
def _about_python(*, openmetrics: bool) -> bytes:
    collector = PlatformCollector(registry=None)
    if openmetrics:
        page: bytes = generate_openmetrics(collector)  # type: ignore[no-untyped-call]
        return page.removesuffix(_EOF)
    return generate_latest(collector)


# --- what the client requests --------------------------------------------------------------------


class ExpositionFormat(NamedTuple):
    """An exposition format and the content type that announces it."""

    openmetrics: bool
    content_type: str


_TEXT = ExpositionFormat(openmetrics=False, content_type="text/plain; version=0.0.4; charset=utf-8")
_OPENMETRICS = ExpositionFormat(
    openmetrics=True, content_type="application/openmetrics-text; version=1.0.0; charset=utf-8"
)


@lru_cache(maxsize=16)
def negotiate_format(accept: str) -> ExpositionFormat:
    """Choose the format that an Accept header prefers, the first of equals; text 0.0.4 as the fallback.

    OpenMetrics 0.0.1 is not offered; a client that accepts 1.0.0 or newer, or names no version, gets 1.0.0.
    """
    best, best_weight = _TEXT, 0.0
    for item in accept.split(","):
        kind, parameters, weight = _parse_accepted(item)
        if kind == "application/openmetrics-text":
            if re.fullmatch(r"0(\..*)?", parameters.get("version", "1.0.0")):
                continue
            offer = _OPENMETRICS
        elif kind in ("text/plain", "text/*", "*/*"):
            offer = _TEXT
        else:
            continue
        if weight > best_weight:
            escaping = "; escaping=underscores" if "escaping" in parameters else ""
            best, best_weight = ExpositionFormat(offer.openmetrics, offer.content_type + escaping), weight
    return best


@lru_cache(maxsize=16)
def gzip_accepted(accept_encoding: str) -> bool:
    """Tell whether an Accept-Encoding header accepts gzip."""
    weights = {kind: weight for kind, _, weight in map(_parse_accepted, accept_encoding.split(","))}
    return weights.get("gzip", weights.get("x-gzip", weights.get("*", 0.0))) > 0


def _parse_accepted(item: str) -> tuple[str, dict[str, str], float]:
    kind, *rest = item.split(";")
    pairs = (each.partition("=") for each in rest)
    parameters = {name.strip().lower(): value.strip().strip('"') for name, _, value in pairs}
    try:
        weight = float(parameters.get("q", "1"))
    except ValueError:
        weight = 0.0
    return kind.strip().lower(), parameters, weight


def select_collectors(config: Config, collect: list[str], exclude: list[str]) -> frozenset[str]:
    """Return the collectors that ``collect[]`` or ``exclude[]`` selects. Raises UsageError if unusable."""
    on = config.sampling.collectors
    if collect and exclude:
        raise UsageError("collect[] and exclude[] cannot be combined; give one of them")
    if wrong := sorted({*collect, *exclude} - on):
        named, known = ", ".join(map(repr, wrong)), ", ".join(sorted(on))
        raise UsageError(f"no collector of this name is on: {named}; these are on: {known}")
    return frozenset(collect) if collect else on - frozenset(exclude)
