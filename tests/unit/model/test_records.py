"""Records are read as they were written, and nothing else is read as a record."""

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.records import RecordError, read_record, write_record
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import demo_recording, read_recording

_SORTED = sorted((Path(__file__).parents[2] / "recordings").glob("*.jsonl.gz"))
RECORDINGS = [path for first in range(5) for path in _SORTED[first::5]]
"""In `make test` a part of each kind is enough: their names sort them by it."""


class Colour(str, enum.Enum):
    """A word."""

    RED = "red"


class Point(NamedTuple):
    """A pair."""

    x: int
    y: float | None


ORIGIN = Point(1, None)


@dataclass(frozen=True)
class Record:
    """One field of every kind."""

    text: str = ""
    flag: bool = False
    point: Point = ORIGIN
    pair: tuple[int, str] | None = None
    points: tuple[Point, ...] = ()
    names: frozenset[str] = frozenset()
    colour: Colour = Colour.RED
    by_pid: Mapping[int, Point] = field(default_factory=dict)
    by_colour: Mapping[Colour, int] = field(default_factory=dict)


FULL = Record(
    "ä\n", True, Point(-1, 0.5), (7, "x"), (Point(1, 2.0),), frozenset("ab"), by_pid={7: Point(1, 1.0)},
    by_colour={Colour.RED: 3},
)  # fmt: skip


@pytest.mark.repeats(kept=14)
@pytest.mark.parametrize("path", [demo_recording(), *RECORDINGS], ids=lambda path: path.name.split(".")[0])
def test_a_snapshot_is_read_as_it_was_written(path: Path) -> None:
    """The snapshots of every recording survive: bytes, states, evidence, agents."""
    tracker = HoldingTracker(idle_after=5.0)
    for number, reading in enumerate(read_recording(path)):
        snapshot = tracker.update(reading)
        if number % 60 == 3:
            assert read_record(write_record(snapshot), Snapshot) == snapshot
        if number > 240:
            break


@pytest.mark.parametrize("record", [Record(), FULL])
def test_every_kind_of_field_survives(record: Record) -> None:
    """Numbers, words, pairs, sets, mappings by number and by word, and None are read as they were."""
    again = read_record(write_record(record), Record)
    assert again == record
    assert type(again.point) is Point
    assert type(again.colour) is Colour


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("text", None), ("text", 7), ("flag", 1), ("flag", "true"), ("point", [1]), ("point", {"x": 1})),
        *(("point", [1, 2, 3]), ("point", [1.5, None]), ("point", [True, None]), ("pair", [7, 7])),
        *(("points", {}), ("points", [[1, "x"]]), ("names", "ab"), ("names", [1]), ("colour", "blue")),
        *(("by_pid", []), ("by_pid", {"x": [1, 2]}), ("by_colour", {"blue": 1})),
    ],
)
def test_another_value_is_no_record(name: str, value: object) -> None:
    """A value of another kind is an error and not a record."""
    raw = {**json.loads(write_record(FULL)), name: value}
    with pytest.raises(RecordError, match="not a Record of this version"):
        read_record(json.dumps(raw), Record)


@pytest.mark.parametrize("text", ["", "[]", "null", "7", "[" * 100_000, "NaN", b"\xff", '{"text": ["x"]}'])
def test_no_record_is_one_error(text: str | bytes) -> None:
    """Text that is not a record at all has the same error."""
    with pytest.raises(RecordError):
        read_record(text, Record)


def test_a_number_that_is_not_finite_is_refused() -> None:
    """Infinity and NaN, which JSON in Python may hold, are not numbers of a record."""
    for word in ("NaN", "Infinity", "-Infinity", "1e999"):
        text = write_record(FULL).decode().replace("0.5", word)
        with pytest.raises(RecordError):
            read_record(text, Record)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(st.sampled_from(sorted(json.loads(write_record(FULL)))), _JSON)
def test_whatever_is_sent_is_a_record_or_an_error(name: str, value: object) -> None:
    """Any JSON in any field gives a record that is written again, or a RecordError, and no other error."""
    raw = {**json.loads(write_record(FULL)), name: value}
    try:
        record = read_record(json.dumps(raw), Record)
    except RecordError:
        return
    assert read_record(write_record(record), Record) == record
