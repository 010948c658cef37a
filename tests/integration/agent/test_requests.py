"""The agent's request handler is never busy for ever."""

import json
import os
import socket
import time
from collections.abc import Callable

import pytest

from vramledger_agent import requests


def send(handler: requests.RequestHandler, name: str = "reclaim") -> dict[str, object]:
    """Send a request over a connection of this process, as the exporter forwards it; return the response."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(30)
        handler.accept(json.dumps({"version": 1, "ask": name}).encode(), [os.dup(theirs.fileno())])
        response: dict[str, object] = json.loads(ours.recv(65536))
        return response


def test_a_process_without_a_thread_to_spare_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no thread can be started the client gets an error, and the next request is handled."""
    handler = requests.RequestHandler({"reclaim": lambda _: {"devices": []}})

    def none_left(_: Callable[..., None], __: tuple[object, ...]) -> int:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(requests._thread, "start_new_thread", none_left)  # type: ignore[attr-defined]  # noqa: SLF001
        refused = send(handler)
    assert refused["ok"] is False
    assert refused["error"] == "the process cannot start a thread now; ask again later"
    deadline = time.monotonic() + 30
    while not (response := send(handler))["ok"] and time.monotonic() < deadline:
        pass
    assert response == {"version": 1, "ok": True, "devices": []}
