"""Define the messages on the control socket: their format, their limits and the words in them.

A message is one JSON object in one packet of a Unix SEQPACKET socket, with the words of the agents' socket: a
request has ``ask``, a response ``ok``, and both have ``version``. Behind the response to :data:`LEDGER` comes
the snapshot, in as many packets as its size needs. The commands write requests and read responses; the
exporter reads requests and writes responses. Neither side uses a word that is not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from vramledger.agent_protocol.messages import FORMAT_VERSION, make_failure, make_request, make_success
from vramledger.errors import VramledgerError

MAX_MESSAGE_BYTES = 4096
"""The longest request, and the longest response without its snapshot."""

MAX_SNAPSHOT_BYTES = 256 * 2**20
"""The longest snapshot that a command reads; 512 holders take 0.6 MiB."""

SNAPSHOT_PACKET_BYTES = 32 * 1024
"""The size of a packet of the snapshot; the kernel's default buffer has room for six."""

REQUEST_SECONDS = 5.0
"""A client must send its request, and read a packet of its response, within this time."""

RESPONSE_SECONDS = 90.0
"""The exporter must answer a release within this time: it waits for the sampler's end."""

LEDGER_SECONDS = 5.0
"""The exporter must answer with its newest snapshot within this time; it needs some milliseconds."""

MAX_RELEASE_SECONDS = 30 * 86400.0
"""The longest release. A longer one is a mistake, and a forgotten one ends."""

_MAX_TOKEN_CHARS = 64

RELEASE = "release"
RESUME = "resume"
LEDGER = "ledger"
PAST = "past"

PAST_SECONDS = 60.0
"""The exporter must answer a question about the past within this time: an hour of readings has many MiB."""


class ControlRequest(NamedTuple):
    """A request to the exporter.

    ``ask`` is :data:`RELEASE`, with ``seconds``; :data:`RESUME`; or :data:`LEDGER`, with the token of the
    snapshot that the client has already, if the exporter is to wait for a newer one; or :data:`PAST`, with a
    question to the storage.
    """

    ask: str
    seconds: float = 0.0
    after: str | None = None
    question: Mapping[str, str | float] = {}


class ControlResponse(NamedTuple):
    """A response: until when the GPUs are released (Unix time), None when they are not."""

    released_until: float | None


class LedgerHeader(NamedTuple):
    """What precedes a snapshot.

    Attributes:
        program: the exporter's version; only the same version writes snapshots that we can read.
        token: names this snapshot.
        wait: seconds within which the exporter answers when there is no newer snapshot.
        idle_after: the exporter's idle threshold, seconds.
        size: bytes of the snapshot.
    """

    program: str
    token: str
    wait: float
    idle_after: float
    size: int


class PastHeader(NamedTuple):
    """What precedes an answer about the past.

    Attributes:
        program: the exporter's version.
        head: what the storage says of the answer.
        size: bytes of the answer.
    """

    program: str
    head: Mapping[str, object]
    size: int


class ControlError(VramledgerError):
    """The message is not one of this version, or the response says why the exporter did not do it."""


def write_request(request: ControlRequest) -> bytes:
    """Return the message of a request."""
    arguments: dict[str, object] = {}
    if request.ask == RELEASE:
        arguments["seconds"] = request.seconds
    if request.ask == PAST:
        arguments["question"] = dict(request.question)
    if request.after is not None:
        arguments["after"] = request.after
    return _message(make_request(request.ask, **arguments))


def read_request(message: bytes) -> ControlRequest:
    """Read a request.

    Raises:
        ControlError: it is not a request.
    """
    content = _parse(message)
    ask = content.get("ask")
    if ask == RESUME:
        return ControlRequest(RESUME)
    after = content.get("after")
    if ask == LEDGER and (after is None or (isinstance(after, str) and len(after) <= _MAX_TOKEN_CHARS)):
        return ControlRequest(LEDGER, after=after)
    if ask == PAST and (question := _read_question(content.get("question"))) is not None:
        return ControlRequest(PAST, question=question)
    seconds = _read_seconds(content.get("seconds"), MAX_RELEASE_SECONDS)
    if ask == RELEASE and seconds is not None:
        return ControlRequest(RELEASE, seconds)
    error = "the exporter does not know this request"
    raise ControlError(error)


_QUESTIONS = {"at": ("at",), "since": ("from", "to"), "readings": ("from", "to")}
"""What a command may ask of the past, and the times that each question has."""


def _read_question(raw: object) -> Mapping[str, str | float] | None:
    """Return a question to the storage, None if it is not one."""
    if not isinstance(raw, dict) or not isinstance(raw.get("ask"), str) or raw["ask"] not in _QUESTIONS:
        return None
    times = {name: _read_seconds(raw.get(name), _LATEST) for name in _QUESTIONS[raw["ask"]]}
    if None in times.values():
        return None
    return {"ask": raw["ask"], **{name: value for name, value in times.items() if value is not None}}


_LATEST = 1e11


def read_past_header(message: bytes) -> PastHeader:
    """Read what precedes an answer about the past.

    Raises:
        ControlError: it is something else, or says why there is none.
    """
    content = _read_success(message)
    program, head, size = content.get("program"), content.get("head"), content.get("size")
    sized = isinstance(size, int) and 0 <= size <= MAX_SNAPSHOT_BYTES
    if not isinstance(program, str) or not isinstance(head, dict) or not isinstance(size, int) or not sized:
        error = "that is not an answer of this version"
        raise ControlError(error)
    return PastHeader(program, head, size)


def write_response(response: ControlResponse | LedgerHeader | PastHeader) -> bytes:
    """Return the message of a response."""
    return _message(make_success(**response._asdict()))


def write_failure(error: object) -> bytes:
    """Return the message of a response that says why the exporter did not do it."""
    return _message(make_failure(str(error)))


def read_response(message: bytes) -> ControlResponse:
    """Read a response.

    Raises:
        ControlError: it is not a response, or it says why the exporter did not do it.
    """
    until = _read_success(message).get("released_until")
    return ControlResponse(float(until) if isinstance(until, int | float) else None)


def read_ledger_header(message: bytes) -> LedgerHeader:
    """Read what precedes a snapshot.

    Raises:
        ControlError: it is something else, or says why the exporter sends no snapshot.
    """
    content = _read_success(message)
    program, token, size = content.get("program"), content.get("token"), content.get("size")
    wait, idle_after = _read_seconds(content.get("wait")), _read_seconds(content.get("idle_after"))
    if (
        not isinstance(program, str)
        or not isinstance(token, str)
        or wait is None
        or idle_after is None
        or not isinstance(size, int)
        or not 0 < size <= MAX_SNAPSHOT_BYTES
    ):
        error = "that is not a snapshot of this version"
        raise ControlError(error)
    return LedgerHeader(program, token, wait, idle_after, size)


def _read_success(message: bytes) -> dict[str, object]:
    content = _parse(message)
    if content.get("ok") is not True:
        raise ControlError(str(content.get("error", "it refused, and gave no reason")))
    return content


def _read_seconds(value: object, longest: float = 1e9) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= longest:
        return float(value)
    return None


def _message(content: Mapping[str, object]) -> bytes:
    return json.dumps(content).encode()


def _parse(message: bytes) -> dict[str, object]:
    try:
        content = json.loads(message)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        error = "that is not a message of the control socket"
        raise ControlError(error)
    if content.get("version") != FORMAT_VERSION:
        error = "that is a message of another version; use the vramledger that runs the exporter"
        raise ControlError(error)
    return content
