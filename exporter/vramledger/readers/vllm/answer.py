"""Ask a vLLM server for its metrics, and take from them what they say of the KV cache.

The server is a user's program. So its answer has a length and a time, its connection carries nothing of ours,
and only a few lines of it are looked at.
"""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterable
from io import BytesIO
from itertools import islice
from typing import NamedTuple

from vramledger.readers.hosts.listening_sockets import Listener

TIMEOUT = 2.0
"""Seconds for a whole answer."""

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
    """What a server says of its KV cache; a value that it does not say is None.

    Attributes:
        usage: the share of the cache's blocks that running requests have.
        memory: the bytes of the cache on each GPU, where the server's command line sets them.
        tokens: how many tokens fit into the cache.
    """

    usage: float | None
    memory: int | None
    tokens: int | None


NOTHING = CacheFigures(None, None, None)


def request_metrics(listener: Listener) -> bytes | None:
    """Return the page of metrics; None where there is no whole and good answer in time."""
    from http.client import HTTPException, HTTPResponse  # noqa: PLC0415 only with --collector.vllm: it loads ssl

    class Received:
        """Stands for a connection on which all of an answer has arrived."""

        def makefile(self, _mode: str) -> BytesIO:
            return BytesIO(received)

    try:
        received = _exchange(listener)
        response = HTTPResponse(Received())  # type: ignore[arg-type]
        response.begin()
        return response.read() if response.status == _OK else None
    except (OSError, HTTPException, ValueError, OverflowError):  # the last for a length beyond 64 bits
        return None


def _exchange(listener: Listener) -> bytes:
    """Return all that the server sends until it closes the connection.

    Raises:
        OSError: it sends too much, or for too long.
    """
    deadline = time.monotonic() + TIMEOUT
    received = bytearray()
    with socket.create_connection((listener.host, listener.port), TIMEOUT) as connection:
        connection.sendall(_REQUEST)
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or len(received) > MAX_BYTES:
                message = "the answer is too long or too slow"
                raise OSError(message)
            connection.settimeout(left)
            if not (chunk := connection.recv(65536)):
                return bytes(received)
            received += chunk


def parse_figures(page: bytes) -> CacheFigures:
    """Return what a page of metrics says of the KV cache.

    A server with several engines has a cache for each, and does not say which process has which: then nothing
    is known of any.
    """
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
