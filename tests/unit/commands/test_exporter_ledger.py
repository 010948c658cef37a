"""Whom a command waits for: an exporter that has given a sample, and no other."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands import exporter_ledger
from vramledger.commands.exporter_ledger import follow_exporter
from vramledger.serving.control_client import NoExporterError


def test_an_exporter_that_ends_before_a_sample_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exporter that starts and ends again and again keeps no command waiting."""
    asked = []

    async def request(path: Path, token: str | None, wait: float) -> tuple[object, bytes]:
        asked.append((token, wait))
        if len(asked) % 2 == 0:
            raise NoExporterError(str(path))
        return SimpleNamespace(program=__version__, token=str(len(asked)), wait=0.0, idle_after=600.0), b""

    blank = SimpleNamespace(snapshot=HoldingTracker(idle_after=600.0).blank, growth={})
    monkeypatch.setattr(exporter_ledger, "request_snapshot", request)
    monkeypatch.setattr(exporter_ledger, "read_answer", lambda _: blank)

    async def first() -> None:
        await anext(follow_exporter(Path("/control.sock")))

    with pytest.raises(NoExporterError):
        asyncio.run(asyncio.wait_for(first(), 60.0))
    assert len(asked) == 2
