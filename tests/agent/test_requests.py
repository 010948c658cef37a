"""The agent's desk: one question at a time, and never closed for good."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

import pytest

from vramledger.agent import requests


def question(desk: requests.RequestHandler) -> dict[str, object]:
    """Ask over a connection of this process, as the exporter passes one on, and return the answer."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(30)
        desk.take(b'{"version": 1, "ask": "reclaim"}', [os.dup(theirs.fileno())])
        answer: dict[str, object] = json.loads(ours.recv(65536))
        return answer


def test_a_process_without_a_thread_to_spare_can_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no thread can be started the asker is told so, and the next question is answered."""
    desk = requests.RequestHandler({"reclaim": lambda _: {"devices": []}})

    def none_left(_: Callable[..., None], __: tuple[object, ...]) -> int:
        message = "can't start new thread"
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(requests._thread, "start_new_thread", none_left)  # type: ignore[attr-defined]  # noqa: SLF001
        refused = question(desk)
    assert (refused["ok"], refused["error"]) == (
        False,
        "the process cannot start a thread now; ask again later",
    )

    deadline = time.monotonic() + 30
    while not (answer := question(desk))["ok"] and time.monotonic() < deadline:
        pass
    assert answer == {"version": 1, "ok": True, "devices": []}
