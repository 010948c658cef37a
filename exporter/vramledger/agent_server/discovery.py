"""Find the exporter that agents report to, and what they report; find exporters by their command lines.

Only root sees all users' agents.
"""

from __future__ import annotations

import array
import asyncio
import errno
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from vramledger.model.agent_report import Agent, RefusedError, parse
from vramledger.model.reading import Reading
from vramledger.model.records import RecordError, read_record
from vramledger_agent.client import UntrustedListenerError, check_listener
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES, make_request

TIMEOUT = 2.0
"""Seconds for an answer: on a busy host an exporter takes more than half a second."""

NO_SOCKET = "there is no socket"
_MAX_BYTES = 64 * 1024 * 1024
"""The maximum size of all agents' reports together: 1,024 reports of 64 KiB."""


class ExporterStatus(NamedTuple):
    """The state of the socket between agents and an exporter.

    ``problem`` is None when an exporter answers there, ``agents`` is the number of agents that it listed to
    us, and ``open_to_all`` says whether every user can connect.
    """

    path: Path
    problem: str | None
    agents: int = 0
    open_to_all: bool = True


def request_agents(path: Path) -> tuple[Agent, ...]:
    """Return the agents that we may see. Raises OSError without an answer, RefusedError if not ours."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(TIMEOUT)
        connection.connect(str(path))
        try:
            check_listener(connection, path)
        except UntrustedListenerError as error:
            raise ConnectionRefusedError(errno.ECONNREFUSED, str(error)) from error
        connection.send(json.dumps(make_request("agents")).encode())
        data, ancillary, _, _ = connection.recvmsg(
            MAX_MESSAGE_BYTES + 1, socket.CMSG_SPACE(16), socket.MSG_CMSG_CLOEXEC
        )
        lines = b"" if ancillary else connection.recv(MAX_MESSAGE_BYTES)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    files = [os.fdopen(descriptor, "rb") for descriptor in descriptors]
    try:
        parse(data)
        # If another program listens there and sends a pipe instead of a file, reading the pipe could block us
        # for ever.
        if files and stat.S_ISREG(os.fstat(files[0].fileno()).st_mode):
            lines = files[0].read(_MAX_BYTES)
        return tuple(read_record(line, Agent) for line in lines.splitlines())
    except RecordError as error:
        reason = "format"
        raise RefusedError(reason, str(error)) from error
    finally:
        for file in files:
            file.close()


def find_exporter(path: Path) -> ExporterStatus:
    try:
        count = len(request_agents(path))
    except FileNotFoundError:
        return ExporterStatus(path, NO_SOCKET)
    except (OSError, ValueError) as error:
        said = error.strerror or str(error) if isinstance(error, OSError) else str(error)
        return ExporterStatus(path, f"the exporter does not answer ({said})")
    except RefusedError:
        return ExporterStatus(path, "what answers is not an exporter of this version")
    return ExporterStatus(path, None, count, _is_open_to_all(path))


def _is_open_to_all(path: Path) -> bool:
    try:
        socket_open = path.stat().st_mode & 0o006 == 0o006  # noqa: PLR2004 read and write for others
        return socket_open and all(each.stat().st_mode & 0o001 for each in path.absolute().parents)
    except OSError:
        return False


def agent_joiner(path: Path) -> Callable[[Reading], Awaitable[Reading]]:
    """Return a function that adds to a reading the agents of this host's exporter, if there is one."""

    async def add_agents(reading: Reading) -> Reading:
        try:
            agents = await asyncio.to_thread(request_agents, path)
        except (OSError, ValueError, RefusedError):
            return reading
        pids = {entry.pid for device in reading.devices for entry in device.processes or ()}
        return replace(reading, agents=tuple(agent for agent in agents if agent.pid in pids))

    return add_agents


_COMMAND_MAX = 64 * 1024
_NAMES = ("vramledger", "vramledger-python")
"""The second is what the first starts where pip has installed it."""

_FLAGS = ("--control.socket", "--agent.socket", "--source")


class RunningExporter(NamedTuple):
    """A process that looks like ``vramledger serve``.

    What its flags say is None where they say nothing. Any user can give a process this command line, so it
    is only shown, and never used.
    """

    pid: int
    control_socket: str | None
    agent_socket: str | None
    source: str | None = None


def find_exporters(procfs: Path) -> tuple[RunningExporter, ...]:
    """Return the running exporters that we can see, by pid."""
    return tuple(sorted(_search(procfs)))


def _search(procfs: Path) -> Iterator[RunningExporter]:
    for home in procfs.iterdir():
        if not home.name.isdigit():
            continue
        try:
            with (home / "cmdline").open("rb") as file:
                words = file.read(_COMMAND_MAX).decode(errors="replace").rstrip("\0").split("\0")
        except OSError:  # it has ended, or may not be read
            continue
        if _is_exporter(words):
            yield RunningExporter(int(home.name), *(_value(words, flag) for flag in _FLAGS))


def _is_exporter(words: Sequence[str]) -> bool:
    """Tell whether a command line is that of ``vramledger serve``, with an interpreter before it or not.

    What only starts one, such as sudo, is not it.
    """
    if "serve" not in words:
        return False
    *before, program = words[: words.index("serve")] or [""]
    started = not before or Path(before[0]).name.startswith("python")
    return started and Path(program).name in _NAMES


def _value(words: Sequence[str], flag: str) -> str | None:
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word.startswith(f"{flag}="):
            found = word.partition("=")[2]
        elif word == flag:
            found = following
    return found
