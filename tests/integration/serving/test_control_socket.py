"""The control socket's file."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from vramledger.errors import StartupError
from vramledger.serving.control_client import request_exporter
from vramledger.serving.control_socket import serve_control


async def echo(request: Mapping[str, object]) -> Mapping[str, object]:
    """Answer with the request."""
    return {"asked": dict(request)}


def test_the_socket_is_ready_its_owners_alone_and_removed(tmp_path: Path) -> None:
    """It has mode 0600 whatever the umask, answers at once, and leaves nothing behind."""
    path = tmp_path / "run" / "control.sock"

    async def serve() -> object:
        async with serve_control(path, echo, required=True):
            assert path.stat().st_mode & 0o777 == 0o600
            assert list(path.parent.iterdir()) == [path]
            return await asyncio.to_thread(request_exporter, path, {"ask": 1})

    before = os.umask(0)
    try:
        assert asyncio.run(serve()) == {"asked": {"ask": 1}}
    finally:
        os.umask(before)
    assert list(path.parent.iterdir()) == []


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """A dead exporter's socket is taken over; one that answers stays, and the message says so."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))

    async def serve() -> None:
        async with serve_control(path, echo, required=True):
            with pytest.raises(StartupError, match="another exporter answers there; choose another place"):
                async with serve_control(path, echo, required=True):
                    pass
            assert await asyncio.to_thread(request_exporter, path, {}) == {"asked": {}}
            async with serve_control(path, echo, required=False):
                pass
            assert path.exists(), "who goes on without a socket removes nobody else's"

    asyncio.run(serve())
    assert not path.exists()


def test_a_long_path_is_no_longer_for_us(tmp_path: Path) -> None:
    """Any path that the kernel takes (107 bytes) will do, for the name that we first bind is short."""
    path = Path(f"{tmp_path}/{'x' * (106 - len(str(tmp_path)))}")

    async def serve() -> None:
        async with serve_control(path, echo, required=True):
            assert await asyncio.to_thread(request_exporter, path, {}) == {"asked": {}}

    asyncio.run(serve())
