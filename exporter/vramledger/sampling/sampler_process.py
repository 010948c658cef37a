"""Start a sampler as a child process, or through the process that may give it its rights."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from typing import TypeAlias

from vramledger.config import SamplingConfig
from vramledger.errors import StartupError
from vramledger.logs import settings
from vramledger.sampling.protocol import encode_config, sampler_command, starter_command
from vramledger.sampling.starter import SAMPLER, STARTER_ENDED, STARTER_FAILED, STARTER_KILL, STARTER_STARTED

LINE_LIMIT = 64 * 1024 * 1024
_END_SECONDS = 2.0
_MESSAGE_BYTES = 64


class ChildProcess:
    """A sampler that is our own child."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = process.pid
        self.stdout = process.stdout

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill_now(self) -> None:
        """Kill it, if it has not been waited for.

        We do not use asyncio's ``kill``, which reaps the process while asyncio's thread still waits for it.
        The thread then reports an unknown child and makes up an exit status (Python 3.10 and 3.11).
        """
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


async def start_child(config: SamplingConfig) -> SamplerProcess:
    """Start a sampler as our own child, with the rights that we have."""
    process = await asyncio.create_subprocess_exec(
        *sampler_command(encode_config(config), *settings()),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_LIMIT,
    )
    return ChildProcess(process)


class _StartedProcess:
    """A sampler that the starter has started."""

    def __init__(
        self, pid: int, stdout: asyncio.StreamReader, pipe: asyncio.ReadTransport, starter: Starter
    ) -> None:
        self.pid = pid
        self.stdout = stdout
        self.pipe = pipe
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._starter = starter

    @property
    def returncode(self) -> int | None:
        return self.ended.result() if self.ended.done() else None

    async def wait(self) -> int:
        return await asyncio.shield(self.ended)

    def kill_now(self) -> None:
        if not self.ended.done():
            self._starter.request_kill()


SamplerProcess: TypeAlias = ChildProcess | _StartedProcess


class Starter:
    """The process that starts samplers, as the exporter sees it; used from the event loop only."""

    def __init__(self, config: SamplingConfig) -> None:
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)  # noqa: FBT003 the standard library's
        try:
            with other:
                self._process = subprocess.Popen(  # noqa: S603 our own program
                    starter_command(encode_config(config), *settings()),
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                )
        except OSError as error:
            self._socket.close()
            raise StartupError(f"cannot start a process: {error.strerror}") from error
        self._starting: asyncio.Future[str] | None = None
        self._sampler: _StartedProcess | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._receive)

    async def start(self, _config: SamplingConfig) -> SamplerProcess:
        """Have a sampler started. Raises OSError if that failed, StartupError if its starter has ended."""
        with open(os.devnull, "rb") as nothing:  # noqa: ASYNC230, PTH123 a device
            reader, writer = os.pipe2(os.O_CLOEXEC)
            try:
                self._starting = self._loop.create_future()
                request_start(self._socket, SAMPLER, nothing.fileno(), writer)
            except OSError as error:
                os.close(reader)
                raise _gone() from error
            finally:
                os.close(writer)
        stdout = asyncio.StreamReader(limit=LINE_LIMIT)
        pipe = os.fdopen(reader, "rb", buffering=0)
        reading, _ = await self._loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
        word, _, number = (await self._starting).partition(" ")
        if word == STARTER_FAILED:
            raise OSError(int(number), os.strerror(int(number)))
        if word != STARTER_STARTED:
            raise _gone()
        self._sampler = _StartedProcess(int(number), stdout, reading, self)
        return self._sampler

    def request_kill(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(STARTER_KILL.encode())

    def close(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        if self._sampler is not None:
            self._sampler.pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)

    def _receive(self) -> None:
        try:
            message = self._socket.recv(_MESSAGE_BYTES).decode()
        except BlockingIOError:
            return
        except OSError:
            message = ""
        word, _, number = message.partition(" ")
        starting, sampler = self._starting, self._sampler
        if word != STARTER_ENDED and starting is not None and not starting.done():
            starting.set_result(message)
        if word in (STARTER_ENDED, "") and sampler is not None and not sampler.ended.done():
            sampler.ended.set_result(int(number or -signal.SIGKILL))
        if not message:
            self._loop.remove_reader(self._socket)
            if sampler is not None:  # one that has just begun may outlive the starter until its next write
                sampler.pipe.close()


def request_start(starter: socket.socket, child: str, source: int, target: int) -> None:
    """Have a starter start a named child with these descriptors. Raises OSError if it cannot now."""
    descriptors = array.array("i", [source, target])
    starter.sendmsg([child.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])


def _gone() -> StartupError:
    return StartupError("the process that starts samplers has ended; start the exporter again")
