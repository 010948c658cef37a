"""The control socket: its file and its messages."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from vramledger.errors import StartupError
from vramledger.serving.callers import Caller
from vramledger.serving.control_client import request_exporter, request_ledger
from vramledger.serving.control_messages import (
    LEDGER,
    RELEASE,
    RESUME,
    ControlError,
    ControlRequest,
    ControlResponse,
    LedgerHeader,
    PastHeader,
    read_request,
    read_response,
    write_failure,
    write_request,
    write_response,
)
from vramledger.serving.control_socket import ControlHandlers, serve_control

ASKED = ControlRequest(RELEASE, 7.0)


async def echo(request: ControlRequest) -> ControlResponse:
    """Answer with the seconds of the request."""
    return ControlResponse(request.seconds)


async def large(request: ControlRequest, _: Caller) -> tuple[LedgerHeader, bytes]:
    """Answer with a snapshot of many packets."""
    text = bytes(range(256)) * 4096
    return LedgerHeader("1.2.3", f"after {request.after}", 2.5, 600.0, len(text)), text


async def past(request: ControlRequest, _: Caller) -> tuple[PastHeader, bytes]:
    """Answer with the question."""
    text = repr(dict(request.question)).encode()
    return PastHeader("1.2.3", {"asked": True}, len(text)), text


HANDLERS = ControlHandlers(echo, large, past, lambda: True)


def test_the_socket_is_ready_open_to_all_and_removed(tmp_path: Path) -> None:
    """Every user may connect with every umask, it answers immediately, and leaves no file behind."""
    path = tmp_path / "run" / "control.sock"

    async def serve() -> object:
        async with serve_control(path, HANDLERS, required=True):
            assert path.stat().st_mode & 0o777 == 0o666
            assert list(path.parent.iterdir()) == [path]
            return await request_exporter(path, ASKED)

    before = os.umask(0o077)
    try:
        assert asyncio.run(serve()) == ControlResponse(7.0)
    finally:
        os.umask(before)
    assert list(path.parent.iterdir()) == []


def test_a_snapshot_of_any_size_arrives_whole(tmp_path: Path) -> None:
    """A snapshot that is larger than the kernel's buffer arrives whole, with what the exporter says of it."""
    path = tmp_path / "control.sock"

    async def serve() -> tuple[LedgerHeader, bytes]:
        async with serve_control(path, HANDLERS, required=True):
            return await request_ledger(path, "7")

    header, text = asyncio.run(serve())
    assert header == ("1.2.3", "after 7", 2.5, 600.0, 2**20)
    assert text == bytes(range(256)) * 4096


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """A dead exporter's socket is replaced; one that answers stays, and the message says so."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))

    async def serve() -> None:
        async with serve_control(path, HANDLERS, required=True):
            with pytest.raises(StartupError, match="another exporter answers there; choose another path"):
                async with serve_control(path, HANDLERS, required=True):
                    pass
            assert await request_exporter(path, ASKED) == ControlResponse(7.0)
            async with serve_control(path, HANDLERS, required=False):
                pass
            assert path.exists(), "who goes on without a socket removes nobody else's"

    asyncio.run(serve())
    assert not path.exists()


def test_a_long_path_is_no_longer_for_us(tmp_path: Path) -> None:
    """Every path that the kernel accepts (107 bytes) works, because the temporary name is short."""
    path = Path(f"{tmp_path}/{'x' * (106 - len(str(tmp_path)))}")

    async def serve() -> None:
        async with serve_control(path, HANDLERS, required=True):
            assert await request_exporter(path, ASKED) == ControlResponse(7.0)

    asyncio.run(serve())


@pytest.mark.parametrize(
    "request_",
    [
        *(ControlRequest(RESUME), ControlRequest(RELEASE, 0.5)),
        *(ControlRequest(LEDGER), ControlRequest(LEDGER, after="ab-7-1")),
    ],
)
def test_a_request_is_read_as_it_was_written(request_: ControlRequest) -> None:
    """The exporter reads exactly what a command writes."""
    assert read_request(write_request(request_)) == request_


@pytest.mark.parametrize("response", [ControlResponse(None), ControlResponse(1e9)])
def test_a_response_is_read_as_it_was_written(response: ControlResponse) -> None:
    """A command reads exactly what the exporter writes."""
    assert read_response(write_response(response)) == response


def test_a_failure_is_an_error_with_its_reason() -> None:
    """A refusal of the exporter is an error of the command, with the exporter's text."""
    with pytest.raises(ControlError, match=r"^the driver hangs$"):
        read_response(write_failure("the driver hangs"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"", "not a message"),
        (b"[]", "not a message"),
        (b"\xff", "not a message"),
        (b"[" * 4000, "not a message"),
        (b"{}", "another version"),
        (b'{"version": 2, "ask": "resume"}', "another version"),
        (b'{"version": 1, "ask": "reboot"}', "does not know"),
        (b'{"version": 1, "ask": "release"}', "does not know"),
        (b'{"version": 1, "ask": "ledger", "after": 7}', "does not know"),
        (b'{"version": 1, "ask": "ledger", "after": "' + b"x" * 65 + b'"}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": 0}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": 2592001}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": true}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": NaN}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": Infinity}', "does not know"),
    ],
)
def test_what_is_no_request_is_refused_in_one_sentence(line: bytes, words: str) -> None:
    """Garbage, another version, an unknown word and an invalid time have different errors."""
    with pytest.raises(ControlError, match=words):
        read_request(line)
