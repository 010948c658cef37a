"""Ask the vLLM servers of holders how full their KV caches are: only with ``--collector.vllm``.

No sample waits for them, and only a server that is certainly a holder's own is asked. It is a user's program.
So its answer has a length and a time, its connection carries nothing of ours, and only a few lines of it are
looked at.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice, pairwise
from typing import NamedTuple

from vramledger.exchange import ask_http
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import ProcessRow
from vramledger.readers.collector import BoundedReader, Collector, Context, Health, Part
from vramledger.readers.hosts.facts import FILE_CAP, read_file, split_arguments, status_fields
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.sockets import Listener, find_listener
from vramledger.readers.hosts.stat import read_row

TIMEOUT = 2.0
MAX_BYTES = 2**20
"""The maximum length of an answer, in bytes. It is not measured; vLLM's metrics are some hundred lines."""

_MAX_LINE = 16 * 1024
_MAX_LINES = 64
_USAGE = (b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
"""The first name is that of vLLM 0.9 and later."""

_CONFIG = b"vllm:cache_config_info"
_LABEL = re.compile(rb'(?:^|,)(kv_cache_memory_bytes|kv_cache_size_tokens)="([0-9]{1,16})"')
"""Only what is wanted: any label would take seconds for a long line, and no other thread runs then."""

_LINE = re.compile(rb"^(?:%s)[^\n]*" % b"|".join((*_USAGE, _CONFIG)), re.MULTILINE)
_SAMPLE = re.compile(rb"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? +(?P<value>\S+)(?: +\S+)? *")
_OK = 200
_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\nConnection: close\r\n\r\n"


class CacheFigures(NamedTuple):
    """What a server says of its KV cache; a value that it does not say is None."""

    usage: float | None  # the share of the cache's blocks that running requests have
    memory: int | None  # the bytes of the cache on each GPU, where the server's command line sets them
    tokens: int | None  # how many tokens fit into the cache


NOTHING = CacheFigures(None, None, None)


def request_metrics(listener: Listener) -> bytes | None:
    """Return the page of metrics; None where there is no whole and good answer in time."""
    until = time.monotonic() + TIMEOUT
    try:
        with socket.create_connection((listener.host, listener.port), TIMEOUT) as connection:
            status, page = ask_http(connection, _REQUEST, until, MAX_BYTES)
    except (OSError, ValueError):
        return None
    return page if status == _OK else None


def parse_figures(page: bytes) -> CacheFigures:
    """Return the KV cache of a metrics page; None for several engines, whose processes are not told."""
    lines = [match[0] for match in islice(_LINE.finditer(page), _MAX_LINES + 1)]
    samples = [match for line in lines if len(line) <= _MAX_LINE and (match := _SAMPLE.fullmatch(line))]
    usages = next(filter(None, ([each for each in samples if each["name"] == name] for name in _USAGE)), [])
    configs = [each for each in samples if each["name"] == _CONFIG]
    if len(usages) > 1 or len(configs) > 1 or len(lines) > _MAX_LINES:
        return NOTHING
    labels = dict(_LABEL.findall(configs[0]["labels"] or b"")) if configs else {}
    return CacheFigures(
        _ratio(each["value"] for each in usages),
        _count(labels.get(b"kv_cache_memory_bytes", b"")),
        _count(labels.get(b"kv_cache_size_tokens", b"")),
    )


def _ratio(values: Iterable[bytes]) -> float | None:
    for value in values:
        try:
            number = float(value)
        except ValueError:
            return None
        return number if math.isfinite(number) and 0 <= number <= 1 else None
    return None


def _count(value: bytes) -> int | None:
    """Read a whole number above 0; what is not set is the word None."""
    return int(value) if re.fullmatch(rb"[1-9][0-9]{0,15}", value) else None


_DEFAULT_PORT = 8000
_PORT_MAX = 65535
_ANCESTORS_MAX = 4
"""How far above a holder its server may be: a worker's parent is the engine, its parent the server."""

_MODULE = re.compile(r"(?:.*/)?vllm[./]entrypoints[./](?:openai[./])?api_server(?:\.py)?", re.DOTALL)
_UNREACHABLE = ("--ssl-keyfile", "--ssl-certfile", "--uds", "--headless")
"""The options of a server that has no plain HTTP over TCP."""


class Server(NamedTuple):
    """A process that serves vLLM's metrics, and its socket."""

    pid: int
    start: int
    listener: Listener


def find_port(argv: Sequence[str]) -> int | None:
    """Return the port at which a vLLM server listens, by its command line; None if it is not one."""
    script = any(word.rpartition("/")[2] == "vllm" and command == "serve" for word, command in pairwise(argv))
    if not script and not any(map(_MODULE.fullmatch, argv)):
        return None
    if any(word.partition("=")[0] in _UNREACHABLE for word in argv):
        return None
    given = str(_DEFAULT_PORT)
    for position, word in enumerate(argv):
        if word == "--port" and position + 1 < len(argv):
            given = argv[position + 1]
        elif word.startswith("--port="):
            given = word.removeprefix("--port=")
    return int(given) if re.fullmatch(r"[0-9]{1,5}", given) and 0 < int(given) <= _PORT_MAX else None


def find_server(root: str, row: ProcessRow) -> Server | None:
    """Return the nearest server among a holder and its ancestors of the same user; None if there is none.

    Only the port in the command line is ever connected to: a request at another port of an engine, where its
    processes speak to each other, could disturb it.
    """
    uid = _uid(root, row.pid)
    each: ProcessRow | None = row
    for _ in range(1 + _ANCESTORS_MAX):
        if each is None or uid is None or _uid(root, each.pid) != uid:
            return None
        port = find_port(split_arguments(read_file(f"{root}/{each.pid}/cmdline", FILE_CAP, [])))
        if port is not None and (listener := find_listener(root, each.pid, port)) is not None:
            return Server(each.pid, each.start, listener)
        above = read_row(root, each.ppid) if each.ppid else None
        each = above if above is not None and above.start <= each.start else None
    return None


def _uid(root: str, pid: int) -> bytes | None:
    words = status_fields(read_file(f"{root}/{pid}/status", FILE_CAP, [])).get(b"Uid", b"").split()
    return words[0] if words else None


READ_INTERVAL = 10.0
KEEP = 60.0
"""Seconds for which a round's figures are shown: more than two rounds, one with silent servers."""

MAX_SERVERS = 16
ROUND_MAX = 25.0
"""Seconds after which no further server is asked in a round; the others have their turn in the next one."""

STUCK_AFTER = 45.0


class _Round(NamedTuple):
    """What was found in one round; ``begun`` and ``seconds`` say when, and how long it took."""

    begun: float
    seconds: float
    found: tuple[KvCache, ...]


class KvCacheReader(Collector):
    """Ask in a thread, one server after the other."""

    def __init__(
        self,
        root: str,
        *,
        request: Callable[[Server], bytes | None] = lambda server: request_metrics(server.listener),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root = root
        self._request = request
        self._clock = clock
        self._rounds: BoundedReader[_Round | None] = BoundedReader(
            stuck_after=STUCK_AFTER, max_stuck=1, clock=clock
        )
        self._known: tuple[KvCache, ...] = ()
        self._begun = self._answered = float("-inf")
        self._silent: set[tuple[int, int]] = set()
        self._asked: dict[tuple[int, int], float] = {}
        self.seconds: float | None = None
        """How long the last round took; None before its end."""
        self._error: Exception | None = None

    def read(self, context: Context) -> Part:
        return {"kv_caches": self.update(context.rows)}

    @property
    def health(self) -> Health | None:
        """Whether a round has ended lately, and how long it took; None before the first one."""
        return None if self.seconds is None else (self.answers, self.seconds)

    def errors(self) -> Iterator[Exception]:
        if self._error is not None:
            yield self._error

    @property
    def answers(self) -> bool:
        """Whether a round has ended lately; the servers of one may have been silent."""
        return self._clock() - self._answered <= KEEP

    def update(self, rows: Iterable[ProcessRow]) -> tuple[KvCache, ...]:
        """Return what is known of these processes, and have it read again when it is time."""
        listed = tuple(rows)
        if not listed:
            self.seconds = None
        for ended in self._rounds.collect(0.0):
            if ended is None:  # it hangs, and was given up
                self._known = ()
            elif ended.begun > self._answered:
                self._answered, self.seconds, self._known = ended
            self._error = None
        failed = self._rounds.take_errors()
        if failed and self._error is None:
            self._begun = float("-inf")  # once more at once
        if failed:
            self._error, self._known = next(iter(failed.values())), ()
        if listed and not self._rounds.busy and self._clock() - self._begun >= READ_INTERVAL:
            self._begun = self._clock()
            self._rounds.submit("vllm", partial(self._ask_servers, listed, self._begun), lambda: None)
        if not self.answers:
            self._known = ()
        present = {(row.pid, row.start) for row in listed}
        return tuple(each for each in self._known if (each.pid, each.start) in present)

    def _ask_servers(self, rows: tuple[ProcessRow, ...], begun: float) -> _Round:
        servers = {row: server for row in rows if (server := find_server(self._root, row)) is not None}
        named = {(server.pid, server.start): server for server in servers.values()}
        # Those that did not answer come last: they must not use up the requests of the others. Otherwise the
        # one that has waited longest comes first, so that each has its turn.
        order = sorted(named, key=lambda each: (each in self._silent, self._asked.get(each, 0.0), each))
        figures: dict[Server, CacheFigures] = {}
        for name in order[:MAX_SERVERS]:
            if self._clock() - begun > ROUND_MAX:
                break
            self._asked[name] = self._clock()
            page = self._request(named[name])
            if page is None:
                self._silent.add(name)
            else:
                self._silent.discard(name)
                figures[named[name]] = parse_figures(page)
        self._silent &= named.keys()
        self._asked = {name: at for name, at in self._asked.items() if name in named}
        # Another program cannot have answered if the same socket still listens, and in the same process.
        found = tuple(
            KvCache(row.pid, row.start, *figures[server])
            for row, server in servers.items()
            if figures.get(server, NOTHING) != NOTHING and find_server(self._root, row) == server
        )
        return _Round(begun, self._clock() - begun, found)


def make_collector(host: Host) -> KvCacheReader:
    return KvCacheReader(str(host.root))
