"""The control socket: how ``vramledger release`` reaches the exporter that runs on this host.

A Unix socket with mode 0600; the kernel says who is at the other end, and only root and the exporter's own
user are heard. A request and its answer are a line of JSON each.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vramledger.errors import StartupError, VramledgerError
from vramledger.logs import fields, log

DEFAULT_PATH = Path("/run/vramledger/control.sock")

_LONGEST = 4096
# Bytes of a request.

_PATIENCE = 5.0
# Seconds in which a client must have asked.

_ANSWER = 90.0
# Seconds in which the exporter must have answered: letting go waits for the sampler's end.

ControlResponse = Mapping[str, object]
ControlHandler = Callable[[Mapping[str, object]], Awaitable[ControlResponse]]


@asynccontextmanager
async def serve_control(path: Path, handle: ControlHandler, *, must: bool) -> AsyncIterator[None]:
    """Answer on the socket until the block ends.

    Where that is not possible the exporter goes on without, unless it ``must``.

    Raises:
        StartupError: it must, and cannot.
    """
    try:
        listening = _listen(path)
    except (OSError, StartupError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        message = f"cannot make the control socket {path}: {why}"
        if must:
            choice = f"{message}; choose another place with --control.socket"
            raise StartupError(choice) from error
        log.info("No control socket: 'vramledger release' will not find us", extra=fields(err=message))
        yield
        return
    server = await asyncio.start_unix_server(_session(handle), sock=listening, limit=_LONGEST)
    ours = _inode(path)
    try:
        yield
    finally:
        server.close()
        _remove(path, ours)


def _listen(path: Path) -> socket.socket:
    """Listen on the path; a socket that nobody answers on any more is replaced."""
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if path.exists() and not path.is_socket():  # which refuses a connection as a stale socket does
        message = "it is no socket; move it away"
        raise StartupError(message)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except FileNotFoundError:
            pass
        else:
            message = "another exporter answers there"
            raise StartupError(message)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listening.bind(str(path))
        listening.listen(8)
        listening.setblocking(False)  # noqa: FBT003 the socket module's own
    except BaseException:
        listening.close()
        raise
    finally:
        os.umask(before)
    return listening


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _remove(path: Path, ours: int | None) -> None:
    """Remove our socket, and not that of an exporter that came after us."""
    with suppress(OSError):
        if _inode(path) == ours:
            path.unlink()


def _session(
    handle: ControlHandler,
) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = await _answer(handle, reader, writer.get_extra_info("socket"))
            writer.write(json.dumps(said).encode() + b"\n")
            await writer.drain()
        except (ConnectionError, asyncio.TimeoutError):
            pass  # nobody to answer
        finally:
            writer.close()

    return answer


async def _answer(
    handle: ControlHandler, reader: asyncio.StreamReader, peer: socket.socket
) -> ControlResponse:
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    try:
        line = await asyncio.wait_for(reader.readline(), _PATIENCE)
        if uid not in (0, os.geteuid()):  # only now: who is refused before having asked meets a broken pipe
            log.warning("Refused a stranger on the control socket", extra=fields(pid=pid, uid=uid))
            return {"error": "only root and the exporter's own user may ask that"}
        request = json.loads(line)
    except ValueError:  # no JSON, or a line without an end
        return {"error": "that is no request"}
    if not isinstance(request, dict):
        return {"error": "that is no request"}
    log.info("Asked on the control socket", extra=fields(pid=pid, uid=uid, request=json.dumps(request)))
    try:
        return await handle(request)
    except VramledgerError as error:
        return {"error": str(error)}


def request_exporter(path: Path, request: ControlResponse) -> dict[str, object]:
    """Ask the exporter that listens there.

    Raises:
        StartupError: there is none, it may not be asked, or it says no.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(_ANSWER)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = json.loads(client.makefile("rb").readline(_LONGEST))
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
