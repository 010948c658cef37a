"""An exporter's end of the agents' socket, and programs with the agent inside."""

import array
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import vramledger_agent
from tests.support.waiting import PATIENCE, wait_until

PROJECT = Path(__file__).resolve().parents[2]
AGENT_ROOT = Path(vramledger_agent.__file__).parents[1]
"""The folder of the agent's package: of this checkout, or where its wheel was installed."""

STARTUP = AGENT_ROOT / "vramledger_agent" / "startup"
FAKE = Path(__file__).parent / "frameworks" / "standin"


WAIT_FOR_REPORT = """
def wait_for_report():
    import time
    from vramledger_agent.worker import worker
    seen, deadline = worker.session.sequence, time.monotonic() + 30
    while worker.session.sequence < seen + 2 and time.monotonic() < deadline:
        time.sleep(0.01)

"""
"""For a program: a function that returns when a report was sent that was made after the call."""


class FakeExporter:
    """Receive the reports, by pid; ``ended`` has those whose connection for reports has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reports: dict[int, list[dict[str, Any]]] = {}
        self.ended: list[int] = []
        self.answer: dict[str, Any] | None = None
        self.connections: dict[int, socket.socket] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(str(path))
        self._socket.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        asked = False
        with connection, suppress(OSError):
            while message := connection.recv(65536):
                told = json.loads(message)
                asked = asked or "ask" in told
                if "ask" not in told:
                    self.connections[pid] = connection
                    self.reports.setdefault(pid, []).append(told)
                elif (answer := self.answer_to(pid, told)) is not None:
                    connection.send(json.dumps(answer).encode())
        if not asked:  # a question's connection ends before the last report is read
            self.ended.append(pid)

    def watch(self, process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        """Return a program after its first report."""
        wait_until(lambda: self.reports.get(process.pid), "a report")
        return process

    def last_report(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return a program's last report, once its connection has ended."""
        wait_until(lambda: process.pid in self.ended, "the end of its connection")
        return self.reports[process.pid][-1]

    def answer_to(self, pid: int, told: dict[str, Any]) -> dict[str, Any] | None:  # noqa: ARG002 for others
        """Return the answer to a process's request, None for none."""
        return self.answer

    def request(self, pid: int, message: dict[str, Any], user: int | None = None) -> dict[str, Any]:
        """Send a process a request with a connection of ours, or of another user; return its answer."""
        ours = os.geteuid()
        os.seteuid(ours if user is None else user)  # the kernel closes it with the pair
        try:
            client, passed = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        finally:
            os.seteuid(ours)
        with client, passed:
            rights = array.array("i", [passed.fileno()])
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
            self.connections[pid].sendmsg([json.dumps(message).encode()], ancillary)
            client.settimeout(PATIENCE)
            answer: dict[str, Any] = json.loads(client.recv(65536))
            return answer

    def close(self) -> None:
        """Close everything, like an exporter that was stopped."""
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in self.connections.values():
            with suppress(OSError):  # it has ended before us
                connection.shutdown(socket.SHUT_RDWR)
        self.path.unlink()

    def __enter__(self) -> "FakeExporter":  # noqa: PYI034  # typing has Self from 3.11 on
        return self

    def __exit__(self, *_: object) -> None:
        if self.path.exists():
            self.close()


def environment(directory: Path, *path: Path, **variables: str) -> dict[str, str]:
    """Return the environment that ``vramledger run`` would set, with further directories on its path."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PYTHONPATH": os.pathsep.join(map(str, (STARTUP, *path))),
        "PYTHONDONTWRITEBYTECODE": "1", "VRAMLEDGER_AGENT": "1", "VRAMLEDGER_AGENT_INTERVAL": "0.25",
        "VRAMLEDGER_AGENT_SOCKET": str(directory / "agent.sock"),
        "VRAMLEDGER_AGENT_REPORTS": str(directory / "reports"), **variables,
    }  # fmt: skip


def start(
    code: str, environ: dict[str, str], *flags: str, python: str | Path = sys.executable
) -> subprocess.Popen[str]:
    """Start a program; it ends when its standard input does, if it reads it."""
    pipe = subprocess.PIPE
    command = [str(python), *flags, "-c", code]
    return subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    """End a program, which must succeed and write nothing to stderr; return its output."""
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, ""), f"{process.returncode}: {errors}"
    return out


def run(place: Path, code: str, *flags: str, **variables: str) -> str:
    """Run a program with the agent and the stand-in for torch, as :func:`finish` ends it."""
    return finish(start(code, environment(place, FAKE, **variables), *flags))


def go_on(process: subprocess.Popen[str]) -> None:
    """Write the line for which a program waits."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
