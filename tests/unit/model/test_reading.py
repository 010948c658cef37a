"""The readings on the wire and in a recording: what is written is what is read."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramledger.errors import RecordingError
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import (
    DeviceReading,
    DriverWait,
    HiddenHolder,
    MemoryReading,
    Owner,
    ParentFacts,
    PodLabels,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Rank,
    Reading,
    Scheduler,
    XidEvent,
    decode,
    encode,
)

FULL = Reading(
    time=1.5, monotonic=2.5, duration=0.25, boot_id="boot", boot_time=100.0, ticks=250,
    host_pid_namespace=False, failure=("timeout", "why"), driver_version="580", cuda_version="13.0",
    devices=(
        DeviceReading(
            0, "GPU-0", name="NVIDIA H200", minor=0, divided=True, error="lost", duration=0.5,
            memory=MemoryReading(4, 3, 1, None),
            processes=(ProcessEntry(7, None, "CM"), ProcessEntry(8, 0, "G")),
            utilization={"gpu": 0.0},
            process_utilization=(ProcessUtilization(7, 1.0, 0.5, 0.0, 0.0, 0.0),),
            hardware={"device_power_watts": 0.0, "device_clock_hertz": {"sm": 1.0}},
            failed=("memory",),
        ),
        DeviceReading(1, "MIG-1", parent="GPU-0", processes=(), process_utilization=()),
    ),
    rows=(ProcessRow(7, 70, "S", 1, 7, 7, 0, 1),),
    unseen={9: "gone"},
    ended={7: "its container has ended"},
    facts=(
        ProcessFacts(
            7, 70, uid=0, user="root", comm="a b)", command="x", nspid=(7, 1), ignores=("HUP",),
            signs=("LOCAL_RANK",), service_main=True, cgroup=(), libraries=(), leader_alive=False,
            owner=Owner("pod", "ns/pod", namespace="ns"),
            settings=(("XLA_PYTHON_CLIENT_PREALLOCATE", "false"),),
            parent=ParentFacts(1, 2, "init", "init", init=True), denied=("environ",),
            rank=Rank(3, 8, "n7:29500"),
        ),
    ),
    hidden=(HiddenHolder(5, 50, "cuda", "x", None, (0, 1)),),
    waits=(DriverWait(7, 70, 8, "rpcSendMessage", 61.5),),
    kv_caches=(KvCache(7, 70, 0.0, None, 4096),),
    pods=(PodLabels("ml", "train-0", (("app", None), ("team", ""))),),
    events=(XidEvent("GPU-0", 79, 1.0),),
    collectors={"ledger": (False, 0.5)},
)  # fmt: skip


@pytest.mark.parametrize("reading", [FULL, Reading(1.0, 2.0), Reading(1.0, 2.0, hidden=())])
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
