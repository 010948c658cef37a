"""A snapshot is read as documented, or refused with the wrong place."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.torch_snapshots import FORWARD, LINEAR, MAIN, STEP, Heap, training, user
from vramledger_agent.errors import SnapshotError
from vramledger_agent.torch_snapshots.html import snapshot_html
from vramledger_agent.torch_snapshots.sites import compare_snapshots
from vramledger_agent.torch_snapshots.snapshot import parse_snapshot
from vramledger_agent.torch_snapshots.text import difference_text, snapshot_text


@pytest.mark.parametrize(
    "data", [None, [], {}, {"segments": 3}, {"segments": [3]}, {"device_traces": []}, "x"]
)
def test_something_else_is_refused(data: object) -> None:
    """Plain data that is not a snapshot is refused."""
    with pytest.raises(SnapshotError, match="snapshot"):
        parse_snapshot(data)


def _places(data: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _places(value, (*path, key))
    elif isinstance(data, list):
        for number, value in enumerate(data[:2]):
            yield from _places(value, (*path, number))
    yield path


WRONG: list[object] = [None, -1, 2**70, 1.5, "", "x" * 1000, [], [None], {}, {"frames": 1}, True, b"x", (1,)]


@given(place=st.sampled_from(sorted(_places(training(1)), key=str)), value=st.sampled_from(WRONG))
def test_any_value_may_be_wrong(place: tuple[Any, ...], value: object) -> None:
    """With any wrong value, the snapshot is shown completely, or refused in one line."""
    data: Any = copy.deepcopy(training(1))
    if place:
        inner = data
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    else:
        data = value
    refused, text = "", ""
    try:
        snapshot = parse_snapshot(data)
        text = (
            snapshot_text(snapshot)
            + snapshot_html(snapshot, "name")
            + difference_text(compare_snapshots(snapshot, snapshot))
        )
    except SnapshotError as error:
        refused = str(error)
    assert bool(text) != bool(refused)
    assert "\n" not in refused


def test_one_list_a_million_times() -> None:
    """A small file that refers to one list again and again does not block the reader."""
    block = {"size": 1, "state": "active_allocated", "frames": []}
    segment = {"total_size": 1, "blocks": [block] * 10_000}
    with pytest.raises(SnapshotError, match="100,000"):
        parse_snapshot({"segments": [segment] * 10_000}, most=100_000)


def test_old_structure() -> None:
    """Snapshots of versions without addresses, times and stacks in blocks are read, too."""
    block = {"size": 512, "state": "active_allocated", "history": [{"real_size": 500}]}
    data = {"segments": [{"total_size": 2048, "blocks": [block, {"size": 1536, "state": "inactive"}]}]}
    snapshot = parse_snapshot(data)
    assert snapshot.devices[0].allocated == 512
    assert "No history was recorded" in snapshot_text(snapshot)


def test_native_frames_change_no_category() -> None:
    """A snapshot with PyTorch's default stacks has the categories and lines of one without C++ frames."""
    native = user(("??", 0, "unwind"), ("/pytorch/torch/csrc/autograd/engine.cpp", 9, "run"), ("", 0, "x"))
    threads = user(
        ("/usr/include/c++/13/thread", 3, "_M_run"), ("/lib/libc.so.6", 1, "x"), ("??", 0, "clone3")
    )
    found = []
    for before, after in (([], []), (native, threads)):
        heap = Heap()
        for size, frames in ((1024, LINEAR + user(FORWARD, STEP, MAIN)), (2048, []), (512, user(MAIN))):
            heap.allocate(size, [*before, *frames, *after])
        snapshot = parse_snapshot(heap.snapshot())
        found.append([(block.size, block.stack, block.category) for block in snapshot.blocks])
    assert found[1] == found[0]
    assert {category for _, _, category in found[0]} == {"forward pass", "backward pass", "other code"}


def test_several_devices() -> None:
    """Each device has its own part, by PyTorch's own number."""
    heap, other = Heap(), Heap()
    heap.allocate(1024, user(("a.py", 1, "f")))
    other.allocate(2048, user(("b.py", 2, "g")))
    data, more = heap.snapshot(), other.snapshot(device=1)
    both = {"segments": data["segments"] + more["segments"], "device_traces": [heap.trace, other.trace]}
    text = snapshot_text(parse_snapshot(both))
    assert (
        text.index("device 0: 1.0 KiB live") < text.index("a.py:1 f") < text.index("device 1: 2.0 KiB live")
    )
    assert text.index("device 1") < text.index("b.py:2 g")


HOSTILE = "</title><script>alert(1)</script>\x1b[2J\"'&<img src=x onerror=alert(1)>\ud800"


def test_hostile_names_are_inert_on_the_page() -> None:
    """A file name that is HTML is shown as text, in the tables, the picture and the title."""
    heap = Heap()
    heap.allocate(1024, user((HOSTILE, 1, HOSTILE), (HOSTILE, 2, HOSTILE)))
    text = snapshot_html(parse_snapshot(heap.snapshot()), HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.encode("utf-8")
    assert "&lt;script&gt;" in text


def test_page_needs_nothing_else() -> None:
    """The page contains its picture, forbids scripts and downloads, and names no other resource."""
    text = snapshot_html(parse_snapshot(training(4)), "snapshot.pickle")
    assert "default-src 'none'" in text
    assert "<svg" in text
    assert "<polygon" in text
    assert "model.py:41 forward" in text
    for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script"):
        assert word not in text.replace("default-src=", "")


def test_hostile_names_cannot_steer_a_terminal() -> None:
    """Control characters in names become question marks."""
    heap = Heap()
    heap.allocate(1024, user((HOSTILE, 1, "f\x1b]0;x\x07\n")))
    snapshot = parse_snapshot(heap.snapshot())
    for text in (
        snapshot_text(snapshot),
        difference_text(compare_snapshots(parse_snapshot(Heap().snapshot()), snapshot)),
    ):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert all(line == line.rstrip("\r") for line in text.split("\n"))


def test_rest_is_summed() -> None:
    """Places beyond the requested number are one line with their sum."""
    heap = Heap()
    for number in range(30):
        heap.allocate(1024 * (number + 1), user(("a.py", number, "f")))
    snapshot = parse_snapshot(heap.snapshot())
    text = snapshot_text(snapshot, top=29)
    assert "(1 more places)" in text
    assert "1.0 KiB" in text.splitlines()[-2]
