"""Define what the exporter and the process that stores say to each other, over a pair of pipes.

A message has a kind of one byte, its length in four, and its content. The exporter sends :data:`BEGIN`,
:data:`ADD` and :data:`ASK`; it gets :data:`READY`, :data:`AGAIN` and, for each
:data:`ASK`, an :data:`ANSWER` in the same order.
"""

from __future__ import annotations

import struct

from vramledger.sampling.protocol import child_command

BEGIN, ADD, ASK = b"B", b"A", b"Q"
"""Begin a segment with this header; add this line; answer this request."""

READY, AGAIN, ANSWER = b"R", b"G", b"N"
"""The directory is open, or why not; begin a new segment; an answer."""

HEADER = struct.Struct(">cI")

MAX_CONTENT = 512 * 2**20


def pack(kind: bytes, content: bytes) -> bytes:
    """Return a message."""
    return HEADER.pack(kind, len(content)) + content


def storage_command(*arguments: str) -> list[str]:
    """Return the command line of the process that stores."""
    return child_command("storage.process", *arguments)
