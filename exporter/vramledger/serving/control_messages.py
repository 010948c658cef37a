"""Define what the control socket speaks: HTTP over a Unix socket, its paths, its bodies and its limits.

| request | answer |
|---|---|
| ``GET /api/v1/ledger`` | the JSON document of the page's address, for people and programs |
| ``GET /snapshot?after=TOKEN`` | a :class:`SnapshotHead` and the newest snapshot, for our own commands |
| ``GET /past?ask=...`` | a :class:`PastHead` and what the storage answers |
| ``POST /release`` with :class:`ReleaseRequest`, ``POST /resume`` | :class:`Released` |

A head is one line of JSON; what follows it is the rest of the body. What is refused has another status than
200, and :class:`Refused` as its body.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from vramledger.errors import VramledgerError

LEDGER, SNAPSHOT, PAST = "/api/v1/ledger", "/snapshot", "/past"
RELEASE, RESUME = "/release", "/resume"

MAX_REQUEST_BYTES = 8192
"""The longest request, its body included; curl sends 100 bytes."""

MAX_ANSWER_BYTES = 256 * 2**20
"""The longest answer that a command reads; 512 holders take 0.6 MiB."""

REQUEST_SECONDS = 5.0
"""A client must send its request, and read 64 KiB of its answer, within this time."""

RELEASE_SECONDS = 90.0
"""The exporter must answer a release within this time: it waits for the sampler's end."""

LEDGER_SECONDS = 5.0
"""The exporter must answer with its newest snapshot within this time; it needs some milliseconds."""

PAST_SECONDS = 60.0
"""The exporter must answer a question about the past within this time: an hour of readings has many MiB."""

MAX_RELEASE_SECONDS = 30 * 86400.0
"""The longest release. A longer one is a mistake, and a forgotten one ends."""

Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
UnixTime = Annotated[float, msgspec.Meta(gt=0, le=1e11)]
Token = Annotated[str, msgspec.Meta(max_length=64)]


class ReleaseRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Release the GPUs for so many seconds."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_RELEASE_SECONDS)]


class Released(msgspec.Struct, frozen=True):
    """Until when the GPUs are released (Unix time), None when they are not."""

    released_until: float | None


class Refused(msgspec.Struct, frozen=True):
    """Why the exporter did not do it."""

    error: str


class SnapshotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Send the newest snapshot; wait for a newer one than ``after``, the token of one that the client has."""

    after: Token | None = None


class SnapshotHead(msgspec.Struct, frozen=True):
    """What precedes a snapshot."""

    program: str  # the exporter's version; only the same version writes snapshots that we can read
    token: Token  # names this snapshot
    wait: Seconds  # seconds within which the exporter answers when there is no newer snapshot
    idle_after: Seconds  # the exporter's idle threshold, seconds
    agent_socket: str | None = None  # where it listens for agents; None where it takes none


class At(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask", tag="at"):
    """What the ledger was at a moment."""

    at: UnixTime


class Since(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask", tag="since"):
    """What has changed between two moments."""

    begin: UnixTime = msgspec.field(name="from")
    end: UnixTime = msgspec.field(name="to")


class Readings(Since, frozen=True, forbid_unknown_fields=True, tag_field="ask", tag="readings"):
    """The stored readings between two moments."""


PastQuestion = At | Since | Readings


class PastHead(msgspec.Struct, frozen=True):
    """What precedes an answer about the past: the exporter's version, and the storage's own head."""

    program: str
    head: dict[str, Any]


class ControlError(VramledgerError):
    """The message is not one of this version, or the answer says why the exporter did not do it."""


class StorageError(VramledgerError):
    """The storage does not answer, or says why it cannot."""


Message = TypeVar("Message")


def read_question(parameters: dict[str, str]) -> PastQuestion:
    """Read a question about the past from the parameters of its path. Raises ControlError if it is none."""
    kinds: Any = PastQuestion  # to mypy, a union is not a type
    question: PastQuestion = read(parameters, kinds)
    return question


def read(raw: bytes | dict[str, str], kind: type[Message]) -> Message:
    """Read a message, a JSON line or a path's parameters. Raises ControlError if it is something else."""
    try:
        if isinstance(raw, dict):
            return msgspec.convert(raw, kind, strict=False)
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:  # a lone surrogate
        raise ControlError(f"that is not a message of this version of vramledger: {error}") from error


def write(message: msgspec.Struct) -> bytes:
    """Return the line of a message."""
    return msgspec.json.encode(message) + b"\n"
