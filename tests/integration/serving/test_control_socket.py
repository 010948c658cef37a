"""The control socket: its file and its messages."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from vramledger.errors import StartupError
from vramledger.serving.control_client import request_exporter
from vramledger.serving.control_messages import (
    RELEASE,
    RESUME,
    ControlError,
    ControlRequest,
    ControlResponse,
    read_request,
    read_response,
    write_failure,
    write_request,
    write_response,
)
from vramledger.serving.control_socket import serve_control

ASKED = ControlRequest(RELEASE, 7.0)


async def echo(request: ControlRequest) -> ControlResponse:
    """Answer with the seconds of the request."""
    return ControlResponse(request.seconds)


def test_the_socket_is_ready_its_owners_alone_and_removed(tmp_path: Path) -> None:
    """It has mode 0600 with every umask, answers immediately, and leaves no file behind."""
    path = tmp_path / "run" / "control.sock"

    async def serve() -> object:
        async with serve_control(path, echo, required=True):
            assert path.stat().st_mode & 0o777 == 0o600
            assert list(path.parent.iterdir()) == [path]
            return await asyncio.to_thread(request_exporter, path, ASKED)

    before = os.umask(0)
    try:
        assert asyncio.run(serve()) == ControlResponse(7.0)
    finally:
        os.umask(before)
    assert list(path.parent.iterdir()) == []


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """A dead exporter's socket is replaced; one that answers stays, and the message says so."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))

    async def serve() -> None:
        async with serve_control(path, echo, required=True):
            with pytest.raises(StartupError, match="another exporter answers there; choose another path"):
                async with serve_control(path, echo, required=True):
                    pass
            assert await asyncio.to_thread(request_exporter, path, ASKED) == ControlResponse(7.0)
            async with serve_control(path, echo, required=False):
                pass
            assert path.exists(), "who goes on without a socket removes nobody else's"

    asyncio.run(serve())
    assert not path.exists()


def test_a_long_path_is_no_longer_for_us(tmp_path: Path) -> None:
    """Every path that the kernel accepts (107 bytes) works, because the temporary name is short."""
    path = Path(f"{tmp_path}/{'x' * (106 - len(str(tmp_path)))}")

    async def serve() -> None:
        async with serve_control(path, echo, required=True):
            assert await asyncio.to_thread(request_exporter, path, ASKED) == ControlResponse(7.0)

    asyncio.run(serve())


@pytest.mark.parametrize("request_", [ControlRequest(RESUME), ControlRequest(RELEASE, 0.5)])
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
        (b'{"version": 1, "ask": "release", "seconds": 0}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": true}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": NaN}', "does not know"),
        (b'{"version": 1, "ask": "release", "seconds": Infinity}', "does not know"),
    ],
)
def test_what_is_no_request_is_refused_in_one_sentence(line: bytes, words: str) -> None:
    """Garbage, another version, an unknown word and an invalid time have different errors."""
    with pytest.raises(ControlError, match=words):
        read_request(line)
