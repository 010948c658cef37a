"""Readings become snapshots: at once where that is quick, in a thread where it is not."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot
from vramledger.serving import source


class Source:
    """Three readings."""

    pid = None
    idle_after = None

    async def readings(self) -> AsyncIterator[Reading | None]:
        """Yield them."""
        for number in range(3):
            yield Reading(float(number), float(number))


class Accounting:
    """Remembers for each reading whether it was accounted in the thread of the loop."""

    def __init__(self) -> None:
        self.at_once: list[bool] = []

    def update(self, reading: Reading) -> Snapshot:
        """Account for a reading."""
        self.at_once.append(threading.current_thread() is threading.main_thread())
        return Snapshot(serial=int(reading.time))

    def reset(self) -> None:
        """Forget nothing."""


@pytest.mark.parametrize(
    ("quick", "at_once"), [(0.0, [False, False, False]), (60.0, [False, True, True])], ids=["slow", "quick"]
)
def test_quick_readings_in_the_loop(
    monkeypatch: pytest.MonkeyPatch, quick: float, at_once: list[bool]
) -> None:
    """The first reading, and one whose predecessor took long, are left to a thread: requests are served."""
    monkeypatch.setattr(source, "_QUICK", quick)
    accounting = Accounting()

    async def test() -> list[int]:
        return [each.serial async for each in source.snapshots(Source(), accounting)]

    assert asyncio.run(test()) == [0, 1, 2]
    assert accounting.at_once == at_once
