"""A snapshot file is another person's pickle: nothing in it runs, and it cannot overload the machine."""

import gzip
import os
import pickle
import resource
import struct
import threading
from pathlib import Path

import pytest

from tests.support.torch_snapshots import training
from vramledger_agent.errors import SnapshotError
from vramledger_agent.torch_snapshots.safe_pickle import load_plain, unpacked_size


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


def test_limit_is_lifted_again(tmp_path: Path) -> None:
    """The limit on memory is in force only during the reading."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(b"nothing")
    with pytest.raises(SnapshotError):
        load_plain(file)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_large_file_is_refused(tmp_path: Path) -> None:
    """A file above the limit is refused with the limit and a remedy, before it is read as a pickle."""
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps(training(2)))
    with pytest.raises(SnapshotError, match="record a shorter time"):
        load_plain(file, largest=1000)


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A missing file is named."""
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
