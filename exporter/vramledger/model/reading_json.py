"""Write readings as lines of JSON, and read them: for the sampler's pipe, for recordings, for the storage."""

from __future__ import annotations

from typing import Any

import msgspec

from vramledger.errors import RecordingError
from vramledger.model.agent_report import Agent, RefusedError
from vramledger.model.reading import Reading
from vramledger.model.records import READ_ERRORS, write_record

_DECODER = msgspec.json.Decoder(Reading)


def encode(reading: Reading) -> bytes:
    """Write a reading as one line of JSON, without the fields that have their default."""
    return write_record(reading) + b"\n"


def decode(line: bytes | str) -> Reading:
    """Read a line of :func:`encode`, checked as a reading. Raises RecordingError if it is not one."""
    try:
        return _DECODER.decode(line)
    except (RefusedError, UnicodeEncodeError, *READ_ERRORS) as error:
        message = f"not a reading ({error}); record it again with 'vramledger capture'"
        raise RecordingError(message) from error


def agent_plain(agent: Agent) -> list[Any]:
    """Write an agent as JSON values."""
    return list(msgspec.to_builtins(agent))
