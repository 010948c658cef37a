"""Invalid readings: one loses a sample at most, and does not change the samples after it."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.integration.fuzz.conftest import FUZZ
from tests.support.judging import imbalances
from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import Config
from vramledger.errors import RecordingError
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.reading import Reading, decode, encode
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import demo_recording, read_recording
from vramledger.serving.source import snapshots

FILM = [reading for reading, _ in zip(read_recording(demo_recording()), range(12), strict=False)]
PLAIN = [json.loads(encode(reading)) for reading in FILM]
WANT = ScrapeRequest(Config().sampling.collectors)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


class Source:
    """Yield these readings."""

    pid: int | None = None
    idle_after: float | None = None

    def __init__(self, readings: list[Reading]) -> None:
        self._readings = readings

    async def readings(self) -> AsyncIterator[Reading | None]:
        for reading in self._readings:
            yield reading


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:  # noqa: ANN401 - JSON
    """Return the path to every part of a JSON value."""
    found = [path] if path else []
    if isinstance(value, dict):
        for key, inner in value.items():
            found += places(inner, (*path, key))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            found += places(inner, (*path, index))
    return found


def spoilt(message: Any, paths: list[tuple[Any, ...]], changes: list[tuple[int, Any]]) -> str:  # noqa: ANN401
    """Return a message with parts of it, by the number of their path, replaced by arbitrary values."""
    plain = json.loads(json.dumps(message))
    for place, value in changes:
        *way, last = paths[place % len(paths)]
        inner = plain
        with suppress(KeyError, IndexError, TypeError):  # an earlier change has removed it
            for step in way:
                inner = inner[step]
            inner[last] = value
    return json.dumps(plain)


PLACES = [places(each) for each in PLAIN]
CHANGE = st.tuples(st.integers(0, 10**6), JSON)


def changed(number: int, changes: list[tuple[int, Any]]) -> Reading | None:
    """Return a reading with parts of it replaced, None when it is refused."""
    try:
        return decode(spoilt(PLAIN[number], PLACES[number], changes))
    except RecordingError:
        return None


def shown(readings: list[Reading]) -> list[Snapshot]:
    """Return the snapshots that an exporter makes of readings."""

    async def collect() -> list[Snapshot]:
        return [each async for each in snapshots(Source(readings), HoldingTracker(idle_after=60))]

    return asyncio.run(collect())


@FUZZ
@given(st.integers(0, len(FILM) - 2), st.lists(CHANGE, min_size=1, max_size=3))
def test_a_reading_that_is_wrong_costs_itself(number: int, changes: list[tuple[int, Any]]) -> None:
    """For every replaced part of a reading a page is written, and the next readings balance."""
    wrong = changed(number, changes)
    if wrong is None:
        return
    exposition = Exposition(100, lambda: None)
    found = shown([*FILM[:number], wrong, *FILM[number + 1 :]])
    assert len(found) == len(FILM)
    assert all(exposition.render(each, WANT) for each in found)
    assert imbalances(found[number + 1 :]) == []
    assert found[-1].up
