"""Define the messages on the control socket: their format, their limits and the words in them.

A request and its response are one line of JSON each, with the words of the agents' socket: a request has
``ask``, a response ``ok``, and both have ``version``. The commands write requests and read responses; the
exporter reads requests and writes responses. Neither side uses a word that is not here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from vramledger.agent_protocol.messages import FORMAT_VERSION, make_failure, make_request, make_success
from vramledger.errors import VramledgerError

MAX_LINE_BYTES = 4096
"""The longest request, and the longest response."""

REQUEST_SECONDS = 5.0
"""A client must send its request within this time."""

RESPONSE_SECONDS = 90.0
"""The exporter must answer within this time: a release waits for the sampler's end."""

MAX_RELEASE_SECONDS = 30 * 86400.0
"""The longest release. A longer one is a mistake, and a forgotten one ends."""

RELEASE = "release"
RESUME = "resume"


class ControlRequest(NamedTuple):
    """A request to the exporter.

    ``ask`` is :data:`RELEASE`, with ``seconds``, or :data:`RESUME`.
    """

    ask: str
    seconds: float = 0.0


class ControlResponse(NamedTuple):
    """A response: until when the GPUs are released (Unix time), None when they are not."""

    released_until: float | None


class ControlError(VramledgerError):
    """The line is not a message of this version, or the response says why the exporter did not do it."""


def write_request(request: ControlRequest) -> bytes:
    """Return the line of a request."""
    seconds = {"seconds": request.seconds} if request.ask == RELEASE else {}
    return _line(make_request(request.ask, **seconds))


def read_request(line: bytes) -> ControlRequest:
    """Read the line of a request.

    Raises:
        ControlError: it is not a request.
    """
    content = _parse(line)
    if content.get("ask") == RESUME:
        return ControlRequest(RESUME)
    seconds = _read_seconds(content.get("seconds"))
    if content.get("ask") == RELEASE and seconds is not None:
        return ControlRequest(RELEASE, seconds)
    message = "the exporter does not know this request"
    raise ControlError(message)


def write_response(response: ControlResponse) -> bytes:
    """Return the line of a response."""
    return _line(make_success(**response._asdict()))


def write_failure(error: object) -> bytes:
    """Return the line of a response that says why the exporter did not do it."""
    return _line(make_failure(str(error)))


def read_response(line: bytes) -> ControlResponse:
    """Read the line of a response.

    Raises:
        ControlError: it is not a response, or it says why the exporter did not do it.
    """
    content = _parse(line)
    if content.get("ok") is not True:
        raise ControlError(str(content.get("error", "it refused, and gave no reason")))
    until = content.get("released_until")
    return ControlResponse(float(until) if isinstance(until, int | float) else None)


def _read_seconds(value: object) -> float | None:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_RELEASE_SECONDS:
        return float(value)
    return None


def _line(message: Mapping[str, object]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, object]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        message = "that is not a message of the control socket"
        raise ControlError(message)
    if content.get("version") != FORMAT_VERSION:
        message = "that is a message of another version; use the vramledger that runs the exporter"
        raise ControlError(message)
    return content
