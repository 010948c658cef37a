"""Find the vLLM server that a holder is, or that started it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from vramledger.model.reading import ProcessRow
from vramledger.readers.hosts.facts import FILE_CAP, read_file, split_arguments, status_fields
from vramledger.readers.hosts.listening_sockets import Listener, find_listener
from vramledger.readers.hosts.stat import read_row

_DEFAULT_PORT = 8000
_PORT_MAX = 65535
_ANCESTORS_MAX = 4
"""How far above a holder its server may be: a worker's parent is the engine, and the engine's is the server.
One more starts several servers."""

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
    """Return the real user of a process as the kernel writes it."""
    words = status_fields(read_file(f"{root}/{pid}/status", FILE_CAP, [])).get(b"Uid", b"").split()
    return words[0] if words else None
