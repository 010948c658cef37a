"""The readings on the wire and in a recording: what is written is what is read."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.sure import sure
from tests.support.values import values_of
from vramledger.errors import RecordingError
from vramledger.model.reading import ParentFacts, Reading, Scheduler, decode, encode

FULL, *REST = (replace(each, ticks=250) for each in values_of(Reading))


@pytest.mark.parametrize("reading", [FULL, *REST, Reading(1.0, 2.0)])
def test_a_reading_survives_the_wire(reading: Reading) -> None:
    """Decoding returns every value, and distinguishes zero, empty and None."""
    assert decode(encode(reading)) == reading


def test_a_reading_is_one_line() -> None:
    """A newline ends it, other bytes cost nothing, and without ticks it is refused."""
    assert encode(FULL).count(b"\n") == 1
    with pytest.raises(RecordingError, match="ticks"):
        decode('{"time": 1, "monotonic": 2, "ticks": 0}')
    sent = Reading(1.0, 2.0, failure=("recording", "cannot read /tmp/\udcff.gz"), unseen={7: "gone"})
    assert decode(encode(sent)).failure == ("recording", "cannot read /tmp/?.gz")


@given(
    st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=12).map(json.dumps)
)
def test_anything_else_is_refused_in_one_line(line: str) -> None:
    """Text that is not a reading raises one error with a remedy."""
    with pytest.raises(RecordingError, match="record it again") as caught:
        decode(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["devices", "rows", "facts", "hidden", "unseen", "events", "collectors"])
@given(
    st.recursive(
        st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=12,  # with 100, as it is by itself, most of the time goes into making values
    )
)
def test_a_field_of_another_shape_is_refused(name: str, value: object) -> None:
    """A corrupt field gives that error or a reading, never another exception."""
    with contextlib.suppress(RecordingError):
        decode(json.dumps({"time": 1.0, "monotonic": 2.0, name: value}))


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ('{"time": 1, "monotonic": 2, "new": 3}', "`new`"),
        ('{"time": 1, "monotonic": 2, "ticks": "x"}', "$.ticks"),
        ('{"time": 1, "monotonic": 2, "devices": [{"index": 0, "uuid": "GPU-0", "memory": [1]}]}', "memory"),
        ('{"time": 1, "monotonic": 1e999}', "out of range"),
        ('{"time": 1, "monotonic": 2, "agents": [[7, 1, 0, null, "", {"sequence": 1}]]}', "`interval`"),
    ],
)
def test_what_is_wrong_is_named(line: str, place: str) -> None:
    """The refusal of a line says which part of it is not that of a reading."""
    with pytest.raises(RecordingError) as caught:
        decode(line)
    assert place in str(caught.value)


def test_a_recorded_framework_that_is_not_known_is_passed_over() -> None:
    """A recording of another version, or a stranger's, names frameworks that we have no words for."""
    frameworks = [{"framework": name, "devices": [{"ordinal": 0}]} for name in ("new", "torch", "new")]
    told = {"sequence": 1, "interval": 1, "frameworks": frameworks}
    line = {"time": 1, "monotonic": 2, "agents": [[7, 1, 0, None, "", told]]}
    [agent] = decode(json.dumps(line)).agents or ()
    assert [each.framework for each in sure(agent.report).frameworks] == ["torch"]


def test_older_lines_are_read() -> None:
    """Whole numbers for others, and rows of a time when they had fewer columns, are the same readings."""
    line = (
        '{"time": 1, "monotonic": 2, "schedulers": [["slurm", ["*"], []]],'
        ' "facts": [{"pid": 7, "start": 70, "parent": [1, 2, "init", "init", true], "rank": [0, 2, "j"]}]}'
    )
    read = decode(line)
    assert isinstance(read.time, float)
    assert read.schedulers == (Scheduler("slurm", ("*",), ()),)
    assert read.facts[0].parent == ParentFacts(1, 2, "init", "init", init=True)
