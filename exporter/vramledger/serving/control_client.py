"""The commands' end of the control socket, apart from the exporter's, which a command need not load."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from vramledger.errors import StartupError

MAX_LINE = 4096
"""Bytes of a request, and of a response."""

_RESPONSE_TIMEOUT = 90.0
"""Seconds in which the exporter must have answered: a release waits for the sampler's end."""


def request_exporter(path: Path, request: Mapping[str, object]) -> dict[str, object]:
    """Ask the exporter that listens there.

    Raises:
        StartupError: there is none, it may not be asked, or it says no.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_RESPONSE_TIMEOUT)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(client.makefile("rb").readline(MAX_LINE))
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        message = f"no exporter answers at {path}; is 'vramledger serve' running, with this --control.socket?"
        raise StartupError(message) from error
    except PermissionError as error:
        message = f"{path} is not yours to use; run this as root or as the exporter's user"
        raise StartupError(message) from error
    except (OSError, ValueError) as error:
        message = f"the exporter at {path} gave no answer; see its log"
        raise StartupError(message) from error
    if not isinstance(answer, dict) or "error" in answer:
        said = answer.get("error") if isinstance(answer, dict) else answer
        message = f"the exporter says: {said}"
        raise StartupError(message)
    return answer
