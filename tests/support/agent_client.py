"""A small agent that speaks the wire format, in this process or, as a program, in one of its own.

As a program it reads a line of JSON at a time: a list of objects to be sent, one message each. Further
words: ``{"do": "connect"}``, ``{"do": "close"}``, ``{"do": "fork"}`` (a child that goes on holding, and
writes once), ``{"do": "crowd", "count": N}`` (so many further connections), and ``{"do":
"flood", "count": N, "data": TEXT}`` (it sends the text over so many connections until it is killed).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

GIB = 2**30


def report(sequence: int = 1, **more: Any) -> dict[str, Any]:  # noqa: ANN401 a message has any values
    """Make a report of torch on ordinal 0."""
    return {"version": 1, "sequence": sequence, "interval": 1.0, "agent": "0.1.0", "python": "3.11.7", **more}


def torch(ordinal: int = 0, reserved: int = GIB, **figures: Any) -> dict[str, Any]:  # noqa: ANN401 the same
    """Make a report's part about torch on one device."""
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
    """Send one message."""
    connection.send(json.dumps(message).encode())


class Program:
    """An agent in a process of its own."""

    def __init__(self, path: Path, *, user: int | None = None, wrapper: Sequence[str] = ()) -> None:
        self._popen = subprocess.Popen(
            # It changes its user itself: the interpreter may be where only root looks.
            [*wrapper, sys.executable, "-S", __file__, str(path), *([] if user is None else [str(user)])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        """Its pid; behind a wrapper that forks the wrapper's."""
        return self._popen.pid

    def say(self, *messages: Mapping[str, Any]) -> Any:  # noqa: ANN401 what it answers is JSON
        """Let it send messages and wait until it has."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._popen.stdin.write(json.dumps(messages).encode() + b"\n")
        self._popen.stdin.flush()
        return json.loads(self._popen.stdout.readline())

    def end(self) -> None:
        """Kill it."""
        self._popen.kill()
        self._popen.wait()

    def __enter__(self) -> Program:  # noqa: PYI034 Self is of Python 3.11
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.end()
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()


def ask(path: Path, message: Mapping[str, Any]) -> Any:  # noqa: ANN401 what is answered is JSON
    """Request something over a connection of its own, and return the answer."""
    with connect(path) as asking:
        send(asking, message)
        return json.loads(asking.recv(2**17))


def fork(connection: socket.socket, message: Mapping[str, Any]) -> int:
    """Start a child that sends one message, and holds the connection; return its pid."""
    child = os.fork()
    if child == 0:
        send(connection, message)
        os.close(0)
        os.close(1)
        time.sleep(300)
        os._exit(0)
    return child


def flood(path: Path, count: int, data: bytes) -> None:
    """Send over many connections as fast as the other end reads; connect again where it closes one."""
    connections: list[socket.socket] = []
    while True:
        while len(connections) < count:
            connections.append(connect(path))
            connections[-1].setblocking(False)
        for each in connections:
            try:
                each.send(data)
            except BlockingIOError:
                continue
            except OSError:
                each.close()
        connections = [each for each in connections if each.fileno() >= 0]
        time.sleep(0.01)


def main(path: str, *user: str) -> None:
    """Be an agent."""
    if user:
        os.setuid(int(user[0]))
    connection = connect(Path(path))
    crowd: list[socket.socket] = []
    for line in sys.stdin:
        answer: dict[str, Any] = {"pid": os.getpid()}
        for message in json.loads(line):
            word = message.get("do")
            if word in ("connect", "close"):
                connection.close()
                connection = connect(Path(path)) if word == "connect" else connection
            elif word == "ask":
                answer["answer"] = ask(Path(path), message["message"])
            elif word == "fork":
                answer["child"] = fork(connection, message["message"])
            elif word == "crowd":
                crowd += [connect(Path(path)) for _ in range(message["count"])]
            elif word == "flood":
                print(json.dumps(answer), flush=True)
                flood(Path(path), message["count"], message["data"].encode())
            else:
                send(connection, message)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
