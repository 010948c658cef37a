"""A snapshot is read as documented, or refused with the wrong place."""

import gzip
import os
import pickle
import resource
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.torch_snapshots import FORWARD, LINEAR, MAIN, STEP, Heap, training, user
from tests.support.wrong_values import WRONG_PICKLED, places, with_value
from vramledger_agent.errors import SnapshotError
from vramledger_agent.torch_snapshots.html import snapshot_html
from vramledger_agent.torch_snapshots.safe_pickle import load_plain, unpacked_size
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


@given(place=st.sampled_from(sorted(places(training(1)), key=str)), value=st.sampled_from(WRONG_PICKLED))
def test_any_value_may_be_wrong(place: tuple[Any, ...], value: object) -> None:
    """With any wrong value, the snapshot is shown completely, or refused in one line."""
    refused, text = "", ""
    try:
        snapshot = parse_snapshot(with_value(training(1), place, value))
        text = snapshot_text(snapshot) + snapshot_html(snapshot, "name")
        text += difference_text(compare_snapshots(snapshot, snapshot))
    except SnapshotError as error:
        refused = str(error)
    assert bool(text) != bool(refused)
    assert "\n" not in refused


def test_one_list_a_million_times() -> None:
    """A small file that refers to one list again and again does not block the reader."""
    segment = {"total_size": 1, "blocks": [{"size": 1, "state": "active_allocated", "frames": []}] * 10_000}
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
    start = user(("/usr/include/c++/13/thread", 3, "_M_run"), ("/lib/libc.so.6", 1, "x"), ("??", 0, "clone3"))
    found = []
    for before, after in (([], []), (native, start)):
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
    parts = ("device 0: 1.0 KiB live", "a.py:1 f", "device 1: 2.0 KiB live", "b.py:2 g")
    places = [text.index(each) for each in parts]
    assert places == sorted(places)


HOSTILE = "</title><script>alert(1)</script>\x1b[2J\"'&<img src=x onerror=alert(1)>\ud800"


def test_hostile_names_are_inert() -> None:
    """A file name that is HTML is text on the page; control characters become question marks."""
    heap = Heap()
    heap.allocate(1024, user((HOSTILE, 1, HOSTILE), (HOSTILE, 2, HOSTILE)))
    text = snapshot_html(parse_snapshot(heap.snapshot()), HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    assert text.encode("utf-8")
    assert "&lt;script&gt;" in text
    heap = Heap()
    heap.allocate(1024, user((HOSTILE, 1, "f\x1b]0;x\x07\n")))
    snapshot = parse_snapshot(heap.snapshot())
    difference = compare_snapshots(parse_snapshot(Heap().snapshot()), snapshot)
    for text in (snapshot_text(snapshot), difference_text(difference)):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert all(line == line.rstrip("\r") for line in text.split("\n"))


def test_page_needs_nothing_else() -> None:
    """The page contains its picture, forbids scripts and downloads, and names no other resource."""
    text = snapshot_html(parse_snapshot(training(4)), "snapshot.pickle")
    assert "default-src 'none'" in text
    assert "<svg" in text
    assert "<polygon" in text
    assert "model.py:41 forward" in text
    for word in ("http:", "https:", "src=", "href=", "url(", "@import", "<script"):
        assert word not in text.replace("default-src=", "")


def test_rest_is_summed() -> None:
    """Places beyond the requested number are one line with their sum."""
    heap = Heap()
    for number in range(30):
        heap.allocate(1024 * (number + 1), user(("a.py", number, "f")))
    text = snapshot_text(parse_snapshot(heap.snapshot()), top=29)
    assert "(1 more places)" in text
    assert "1.0 KiB" in text.splitlines()[-2]


@pytest.mark.parametrize("protocol", range(6))
def test_plain_data_is_read(tmp_path: Path, protocol: int) -> None:
    """What PyTorch writes, in every protocol of pickle, is read as it was written."""
    file = tmp_path / "snapshot.pickle"
    data = training(3)
    file.write_bytes(pickle.dumps(data, protocol=protocol))
    assert load_plain(file) == data


class Call:
    """An object whose unpickling calls a function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.made = function, arguments

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.made


@pytest.mark.parametrize("protocol", range(6))
def test_no_function_is_called(tmp_path: Path, protocol: int) -> None:
    """A file that would call a function is refused, and the function is not called."""
    file, made = tmp_path / "snapshot.pickle", tmp_path / "made"
    file.write_bytes(pickle.dumps({"segments": [Call(os.mkdir, str(made))]}, protocol=protocol))
    with pytest.raises(SnapshotError, match="mkdir"):
        load_plain(file)
    assert not made.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cbuiltins\neval\n(S'1'\ntR.",  # GLOBAL
        b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",  # STACK_GLOBAL
        b"(S'1'\nibuiltins\neval\n.",  # INST
        b"\x80\x02\x82\x01.",  # EXT1
        b"Pabc\n.",  # PERSID
        b"\x80\x05\x97.",  # NEXT_BUFFER
    ],
)
def test_every_door_is_shut(tmp_path: Path, content: bytes) -> None:
    """None of pickle's ways to name an object outside of the file works."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(content)
    with pytest.raises(SnapshotError):
        load_plain(file)


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04r" + struct.pack("<I", 2**32 - 2) + b".",  # a memo slot far out
        b"\x80\x04K\x01r" + struct.pack("<I", 2**32 - 2) + b".",
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b".",  # a bytearray of a terabyte
        b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b".",  # a string of a terabyte
        b"",
        b"\x80\x04",
        b"no pickle at all",
        pickle.dumps(training(2))[:-1000],
    ],
)
def test_what_is_broken_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file that is cut off, not a pickle, or needs absurd memory gives one line, and no harm."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SnapshotError) as caught:
        load_plain(file)
    assert "\n" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1.5 * 2**20  # KiB


def test_what_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A large or missing file is named; the limit on memory is in force only during the reading."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(b"nothing")
    with pytest.raises(SnapshotError):
        load_plain(file)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    file.write_bytes(pickle.dumps(training(2)))
    with pytest.raises(SnapshotError, match="record a shorter time"):
        load_plain(file, largest=1000)
    with pytest.raises(SnapshotError, match=r"nothing\.pickle"):
        load_plain(tmp_path / "nothing.pickle")


def test_a_packed_file_is_read_and_bounded(tmp_path: Path) -> None:
    """A file of gzip is read like the file in it; what it unpacks to counts against the limit."""
    file = tmp_path / "snapshot.pickle.gz"
    content = pickle.dumps({"segments": ["x" * 9000]})
    file.write_bytes(gzip.compress(content))
    assert load_plain(file) == {"segments": ["x" * 9000]}
    assert unpacked_size(file) == len(content)
    with pytest.raises(SnapshotError, match="is larger than"):
        load_plain(file, largest=8000)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(SnapshotError, match="cannot read"):
        load_plain(file)


def test_a_pipe_is_read(tmp_path: Path) -> None:
    """A pipe has no size and no way back: it is read once, packed or not."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for content in (pickle.dumps([1, 2]), gzip.compress(pickle.dumps([1, 2]))):
        assert unpacked_size(pipe) == 0
        writer = threading.Thread(target=pipe.write_bytes, args=(content,))
        writer.start()
        assert load_plain(pipe) == [1, 2]
        writer.join()
