"""Ask a control socket as another user, or out of a container, with nothing of ours."""

import json
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

REFUSED = "only root and the exporter's own user may request that"

RELEASE = ("POST", "/release", '{"seconds": 60}')
RESUME = ("POST", "/resume", "")
SNAPSHOT = ("GET", "/snapshot", "")

_ASKING = """
import os, socket, sys
path, uid, request = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if uid: os.setgroups([]); os.setgid(uid); os.setuid(uid)
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    connection.connect(path)
    connection.sendall(request.encode())
    while piece := connection.recv(65536): sys.stdout.buffer.write(piece)
"""


class Answer(NamedTuple):
    """An answer: its status, its first line as JSON, and what follows that."""

    status: int
    head: dict[str, Any]
    rest: bytes

    @property
    def error(self) -> str:
        return str(self.head["error"])


def request_bytes(method: str, target: str, body: str = "") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    return f"{method} {target} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n{body}".encode()


def read_answer(raw: bytes) -> Answer:
    """Read an answer, which must be whole."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    assert len(body) == int(headers["content-length"])
    first, _, rest = body.partition(b"\n")
    return Answer(int(status.split()[1]), json.loads(first), rest)


def ask(path: Path, request: tuple[str, str, str], *wrapper: str, uid: int = 0) -> Answer:
    """Send a request as some user, out of some container."""
    sent = request_bytes(*request).decode()
    asking = [*wrapper, "/usr/bin/python3", "-c", _ASKING, str(path), str(uid), sent]
    done = subprocess.run(asking, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return read_answer(done.stdout)
