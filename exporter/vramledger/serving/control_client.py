"""Send requests to the control socket, from a command that does not load the exporter."""

from __future__ import annotations

import socket
from pathlib import Path

from vramledger.errors import StartupError
from vramledger.serving.control_messages import (
    MAX_LINE_BYTES,
    RESPONSE_SECONDS,
    ControlError,
    ControlRequest,
    ControlResponse,
    read_response,
    write_request,
)


def request_exporter(path: Path, request: ControlRequest) -> ControlResponse:
    """Send a request to the exporter that listens there.

    Raises:
        StartupError: no exporter listens, it accepts no requests from our user, or it refuses this request.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(RESPONSE_SECONDS)
            client.connect(str(path))
            client.sendall(write_request(request))
            line = client.makefile("rb").readline(MAX_LINE_BYTES)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        message = f"no exporter answers at {path}; is 'vramledger serve' running, with this --control.socket?"
        raise StartupError(message) from error
    except PermissionError as error:
        message = f"{path} belongs to another user; run this as root or as the exporter's user"
        raise StartupError(message) from error
    except (OSError, ValueError) as error:
        message = f"the exporter at {path} gave no answer; see its log"
        raise StartupError(message) from error
    if not line:
        message = f"the exporter at {path} gave no answer; see its log"
        raise StartupError(message)
    try:
        return read_response(line)
    except ControlError as error:
        message = f"the exporter says: {error}"
        raise StartupError(message) from error
