"""Define what the exporter and the process that stores say to each other, over a pair of pipes.

A message has a kind of one byte, its length in four, and its content. The exporter sends :data:`BEGIN`,
:data:`ADD` and :data:`ASK`; it gets :data:`STATUS`, :data:`AGAIN` and, for each :data:`ASK`, an
:data:`ANSWER` in the same order.

A third process starts the one that stores. The exporter sends it a packet with the two pipes for each start.
"""

from __future__ import annotations

import struct

from vramledger.sampling.protocol import child_command

BEGIN, ADD, ASK = b"B", b"A", b"Q"
"""Begin a segment with this header; add this line; answer this request."""

AGAIN, ANSWER, STATUS = b"G", b"N", b"S"
"""Begin a new segment; an answer; what was stored."""

READY, START = b"ready", b"start"
"""The directory is open (another text says why not); start a process that stores, with the descriptors from
which it reads and to which it writes."""

RESTORE, AT, SINCE, SLIDER, READINGS = "restore", "at", "since", "slider", "readings"
"""The questions."""

PAGE, LEDGER = "page", "ledger"
"""How a moment is wanted: as rows of the page, or as a command reads it."""

PACKET_BYTES = 4096

HEADER = struct.Struct(">cI")

MAX_CONTENT = 512 * 2**20


def pack(kind: bytes, content: bytes) -> bytes:
    """Return a message."""
    return HEADER.pack(kind, len(content)) + content


def keeper_command(*arguments: str) -> list[str]:
    """Return the command line of the process that starts the one that stores."""
    return child_command("storage.keeper", *arguments)


def storage_command(*arguments: str) -> list[str]:
    """Return the command line of the process that stores."""
    return child_command("storage.process", *arguments)
