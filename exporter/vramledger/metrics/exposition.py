"""Turn families into the page that a scrape gets: text 0.0.4 or OpenMetrics 1.0.0, filtered, compressed.

prometheus_client's encoder takes 8 µs a sample. So our encoder stores the lines of every family, and rewrites
those whose value has changed. A test checks that both encoders write the same bytes. What a snapshot gives is
written once. For a scrape that finds the same snapshot only the exporter's own figures are written again.
This module knows two HTTP headers and nothing else of HTTP.
"""

from __future__ import annotations

import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from functools import lru_cache, partial, reduce
from math import isfinite
from typing import NamedTuple, TypeVar

from prometheus_client import PlatformCollector, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from vramledger.config import Config
from vramledger.errors import UsageError
from vramledger.logs import fields, log
from vramledger.metrics import sampling
from vramledger.metrics.contract import collectors
from vramledger.metrics.families import Collected, Family, Labels, Sample
from vramledger.metrics.own_processes import OwnProcesses
from vramledger.model.label import label_text
from vramledger.model.snapshot import Snapshot

_COMPRESSION = 1
"""8 GPUs with 64 holders each: level 1 makes 458 kB into 30 kB in 0.6 ms, level 6 into 27 kB in 1.8 ms."""

_END_WINDOW, _END_MEMORY = 12, 4
"""Bits of the window, and memory level, for what follows a snapshot: 4 kB. zlib's own need 256 KiB, new in
each scrape, which takes 60 µs more."""

_GZIP_HEADER = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 4, 0xFF))
"""A deflated stream, packed fast, without a name and a time (RFC 1952)."""

_GZIP_END = struct.Struct("<LL")
"""The checksum of the text, and its size modulo 2**32."""

_Result = TypeVar("_Result")

_EXPORTER = "exporter"
_PYTHON = ("python_info", "python")
_EOF = b"# EOF\n"


class ScrapeRequest(NamedTuple):
    """What one scrape requests; two scrapes that request the same share a render.

    ``collectors`` are the selected ones; ``names`` are the family or sample names to keep, None for all.
    """

    collectors: frozenset[str]
    names: frozenset[str] | None = None
    openmetrics: bool = False
    compressed: bool = False


class _SnapshotPart(NamedTuple):
    """The beginning of a page, which follows from a snapshot.

    Attributes:
        snapshot: which one.
        request: for which request.
        own_succeeded: whether the exporter's own families could be collected: the page says that as well.
        content: the text, or the beginning of its gzip stream.
        checksum: CRC-32 of the text, 0 if it is not packed.
        size: bytes of the text.
    """

    snapshot: Snapshot
    request: ScrapeRequest
    own_succeeded: bool
    content: bytes
    checksum: int
    size: int


class Exposition:
    """Render snapshots, and remember the lines of the newest one.

    Args:
        most: holdings of a device shown one by one (``--processes.max``).
        sampler_pid: the sampler's process id, None while there is none.
        clock: seconds, for the collectors' durations.
        collect: the collectors to run by name, instead of those of the contract.
        collect_own: gives the families of the exporter itself: its access rules, its storage.
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
        self._texts: dict[str, _FamilyText] = {}  # by name: a family's hash takes longer
        self._headers: dict[tuple[str, bool], bytes] = {}
        self._collect_own = collect_own
        self._own = OwnProcesses(sampler_pid)
        self._failing: set[str] = set()
        self._written: _SnapshotPart | None = None
        self._lock = threading.Lock()

    def render(self, snapshot: Snapshot, request: ScrapeRequest) -> bytes:
        """Write the page; when a collector raises, only its own families are missing."""
        with self._lock:
            health: dict[str, tuple[bool, float]] = {}
            own = b""
            if _EXPORTER in request.collectors:
                own = self._run(_EXPORTER, lambda: self._render_own(request), health) or b""
            own_succeeded = not health or health[_EXPORTER][0]
            part = self._written
            if (
                part is None
                or part.snapshot is not snapshot
                or (part.request, part.own_succeeded) != (request, own_succeeded)
            ):
                text = self._render_snapshot(snapshot, request, health)
                part = _SnapshotPart(snapshot, request, own_succeeded, *_begin_page(text, request))
                self._written = part if not self._failing else None
        return _end_page(part, own + _EOF if request.openmetrics else own)

    def _render_snapshot(
        self, snapshot: Snapshot, request: ScrapeRequest, health: dict[str, tuple[bool, float]]
    ) -> list[bytes]:
        """Return the text family by family; the whole page is the largest object that we ever hold."""
        blocks: list[tuple[str, bytes]] = []
        for name in sorted(request.collectors - {_EXPORTER}):
            encode = partial(self._collect_and_encode, name, snapshot, request)
            blocks += self._run(name, encode, health) or []
            read, seconds = snapshot.collectors.get(name, (True, None))
            if seconds is not None:
                health[name] = read and health[name][0], seconds
            if not snapshot.up:
                del health[name]  # it had nothing to do, and only vramledger_up reports that
        blocks += self._encode(sampling.collect(snapshot, health), request)
        return [text for _, text in sorted(blocks)]

    def _collect_and_encode(
        self, name: str, snapshot: Snapshot, request: ScrapeRequest
    ) -> list[tuple[str, bytes]]:
        return self._encode(self._collect[name](snapshot), request)

    def _render_own(self, request: ScrapeRequest) -> bytes:
        """Return what no snapshot has: the exporter's access rules, storage, processes and interpreter."""
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
            self._record_failure(name, error)
            health[name] = False, self._clock() - started
            return None
        self._failing.discard(name)
        health[name] = True, self._clock() - started
        return result

    def _record_failure(self, name: str, error: Exception) -> None:
        if name not in self._failing:
            self._failing.add(name)
            what = f"{type(error).__name__}: {error}"
            log.error("Collector failed", exc_info=error, extra=fields(collector=name, err=what))

    def _header(self, family: Family, *, openmetrics: bool) -> bytes:
        """Return the lines before a family's samples, made once: they took a fifth of a small page."""
        header = self._headers.get((family.name, openmetrics))
        if header is None:
            header = _header(family, openmetrics=openmetrics).encode()
            self._headers[family.name, openmetrics] = header
        return header

    def _encode(self, collected: Collected, request: ScrapeRequest) -> list[tuple[str, bytes]]:
        """Return (family name, its text) for the wanted families that have samples."""
        blocks = []
        for family, samples in collected:
            if request.names is not None and request.names.isdisjoint((family.name, family.base)):
                continue
            known = self._texts.get(family.name)
            written = _write_lines(family, samples, known)
            if written is not known:
                self._texts[family.name] = written
            if written.text:
                header = self._header(family, openmetrics=request.openmetrics)
                blocks.append((family.name, header + written.text))
        return blocks


def _begin_page(text: list[bytes], request: ScrapeRequest) -> tuple[bytes, int, int]:
    """Return the beginning of a page, packed if that is requested, with its text's checksum and size."""
    size = sum(map(len, text))
    if not request.compressed:
        return b"".join(text), 0, size
    deflate = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, -zlib.MAX_WBITS)
    # A full flush: what is packed after it does not refer to it.
    packed = [_GZIP_HEADER, *map(deflate.compress, text), deflate.flush(zlib.Z_FULL_FLUSH)]
    return b"".join(packed), reduce(lambda crc, each: zlib.crc32(each, crc), text, 0), size


def _end_page(part: _SnapshotPart, text: bytes) -> bytes:
    """Return the page that ends with this text."""
    if not part.request.compressed:
        return part.content + text
    deflate = zlib.compressobj(_COMPRESSION, zlib.DEFLATED, -_END_WINDOW, _END_MEMORY)
    end = _GZIP_END.pack(zlib.crc32(text, part.checksum), (part.size + len(text)) % 2**32)
    return b"".join((part.content, deflate.compress(text), deflate.flush(), end))


class _FamilyText(NamedTuple):
    """The lines of a family, and the samples that they show.

    Attributes:
        samples: in the order of the lines.
        text: the lines; the headers are not among them.
        complete: whether each sample has a line, so that the places of both are the same.
    """

    samples: list[Sample]
    text: bytes
    complete: bool


def _write_lines(family: Family, samples: list[Sample], known: _FamilyText | None) -> _FamilyText:
    """Write the lines of a family in the order of its samples; take unchanged lines from ``known``.

    A duplicate series would make Prometheus reject the whole scrape: its last sample counts. A value that is
    not a finite number is left out.
    """
    if known is not None:
        if samples == known.samples:
            return known
        text = _replace_values(samples, known)
        if text is not None:
            return _FamilyText(samples, text, complete=True)
    series = {} if known is None else _known_series(known)
    lines: dict[Labels, bytes] = {}
    for labels, value in samples:
        if isfinite(value):
            start = series.get(labels) or _series(family, labels).encode()
            lines[labels] = b"%b %b\n" % (start, format_number(value).encode())
    return _FamilyText(samples, b"".join(lines.values()), complete=len(lines) == len(samples))


def _replace_values(samples: list[Sample], known: _FamilyText) -> bytes | None:
    """Return the lines with new values; None if the series are not the same, which is rare."""
    if not known.complete or len(samples) != len(known.samples):
        return None
    lines = known.text.split(b"\n")
    for place, (sample, before) in enumerate(zip(samples, known.samples, strict=True)):
        if sample != before:
            labels, value = sample
            if labels != before[0] or not isfinite(value):
                return None
            start = lines[place].rpartition(b" ")[0]
            lines[place] = b"%b %b" % (start, format_number(value).encode())
    return b"\n".join(lines)


def _known_series(known: _FamilyText) -> dict[Labels, bytes]:
    """Return the beginning of each line, up to its value, by its labels."""
    if not known.complete:
        return {}
    lines = known.text.split(b"\n")[:-1]  # splitlines() would split at \r too, which a label may have
    return {labels: line.rpartition(b" ")[0] for (labels, _), line in zip(known.samples, lines, strict=True)}


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
    """Return prometheus_client's family about the interpreter, which never changes."""
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
    Our names are legal in every escaping scheme that leaves underscores unchanged, and we say so to a client
    that sends a scheme.
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
    """Return the enabled collectors that ``collect[]`` and ``exclude[]`` select.

    Raises:
        UsageError: both are given, or one names a collector that does not exist or is off.
    """
    on = config.sampling.collectors
    if collect and exclude:
        message = "collect[] and exclude[] cannot be combined; give one of them"
        raise UsageError(message)
    if wrong := sorted({*collect, *exclude} - on):
        named, known = ", ".join(map(repr, wrong)), ", ".join(sorted(on))
        message = f"no collector of this name is on: {named}; these are on: {known}"
        raise UsageError(message)
    return frozenset(collect) if collect else on - frozenset(exclude)
