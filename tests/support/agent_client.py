"""What an agent says, and a small agent in this process; a player is one in a process of its own."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

GIB = 2**30


def report(sequence: int = 1, **more: Any) -> dict[str, Any]:  # noqa: ANN401 a message has any values
    """Make a report of torch on ordinal 0."""
    return {"version": 1, "sequence": sequence, "interval": 1.0, "agent": "0.1.0", "python": "3.11.7", **more}


def torch(ordinal: int = 0, reserved: int = GIB, **figures: Any) -> dict[str, Any]:  # noqa: ANN401 the same
    device = {"ordinal": ordinal, "reserved": reserved, "allocated": reserved // 2, **figures}
    return {"framework": "torch", "version": "2.13.0", "policy": "caching", "devices": [device]}


def connect(path: Path) -> socket.socket:
    """Connect as an agent does, but for waiting while too many others do."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))  # without a time: with one it would fail at once
        connection.settimeout(30)
    except OSError:
        connection.close()
        raise
    return connection


def send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    connection.send(json.dumps(message).encode())
