"""Open a pickle that somebody else wrote, and read only plain data from it.

PyTorch writes its memory snapshots with ``pickle``. A pickle file is a program, and this reader does not run
it. It refuses a file that names any class, function or persistent object. What remains are dictionaries,
lists, tuples, sets, strings, bytes, numbers, booleans and None. A file can also request unlimited memory (a
memo slot of four billion, a string of a length that it does not have), so the address space of this process
is limited while it is read.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import pickle
import resource
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

from vramledger_agent.errors import SnapshotError

SIGNED_KEYS = ("address", "addr", "line", "time_us")
"""Addresses of the upper half are negative in some versions; sizes and times never are."""


def mapping(data: object, place: str) -> Mapping[object, object]:
    if not isinstance(data, dict):
        raise_malformed(place, "a dictionary")
    return data


def whole_number(holder: Mapping[object, object], key: str, absent: int | None = None) -> int:
    """Return a whole number, of 0 or more unless :data:`SIGNED_KEYS` has its key."""
    value = holder.get(key, absent)
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**64:
        raise_malformed(key, "a whole number")
    if value < 0 and key not in SIGNED_KEYS:
        raise_malformed(key, "a number of 0 or more")
    return value


def optional_number(holder: Mapping[object, object], key: str) -> int | None:
    return None if holder.get(key) is None else whole_number(holder, key)


def flag(holder: Mapping[object, object], key: str) -> bool:
    value = holder.get(key, False)
    if not isinstance(value, bool):
        raise_malformed(key, "true or false")
    return value


def text(holder: Mapping[object, object], key: str) -> str:
    value = holder.get(key)
    if not isinstance(value, str):
        raise_malformed(key, "a text")
    return value


def items(
    holder: Mapping[object, object], key: str, most: int = 1_000_000
) -> Iterator[Mapping[object, object]]:
    found = holder.get(key, [])
    if not isinstance(found, list | tuple):
        raise_malformed(key, "a list")
    if len(found) > most:
        raise_malformed(key, f"a list of at most {most:,} entries")
    for each in found:
        yield mapping(each, key)


def raise_malformed(place: str, wanted: str) -> NoReturn:
    """Refuse a snapshot. Raises SnapshotError."""
    raise SnapshotError(f"this is not a memory snapshot of PyTorch that we know: {place!r} is not {wanted}")


LARGEST = 512 * 2**20
"""The largest file, in bytes; our agent writes 10,000 events at most."""

_GZIP = b"\x1f\x8b"
"""The first bytes of a file of gzip; its last ones are the size of its content."""
_GZIP_SIZE_BYTES = 4

_ADDRESS_SPACE = 2**30
_ADDRESS_SPACE_PER_BYTE = 24
"""Address space for the reading: what any file may use, plus a number for every byte of this file. An
empty dictionary is one byte in a pickle and 64 in memory, but torch's files are mostly references to
strings that they contain."""

_SECONDS = 60
_BYTES_PER_SECOND = 2**17
"""The same of processor time: 80 MB with 100,000 events take 13 s."""


def load_plain(path: Path, *, largest: int = LARGEST) -> object:
    """Return a pickle's plain data, also gzipped. Raises SnapshotError if it is too large or has more."""
    try:
        with path.open("rb") as file:
            packed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP  # it may be a pipe
            content = (gzip.GzipFile(fileobj=file) if packed else file).read(largest + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise SnapshotError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    except MemoryError as error:
        raise SnapshotError(f"{path} is larger than its end says; it is broken or hostile") from error
    if len(content) > largest:
        raise SnapshotError(
            f"{path} is larger than {largest // 2**20} MiB; record a shorter time or fewer events"
        )
    try:
        with _limited_address_space(_ADDRESS_SPACE + _ADDRESS_SPACE_PER_BYTE * len(content)):
            return _PlainUnpickler(io.BytesIO(content)).load()
    except SnapshotError as error:
        raise SnapshotError(
            f"{path} is not plain data: {error}; it is not opened, and does not come from PyTorch's allocator"
        ) from error
    except MemoryError as error:
        raise SnapshotError(
            f"{path} needs more memory than a snapshot of its size can need; it is broken or hostile"
        ) from error
    except Exception as error:  # a broken pickle can raise any exception
        raise SnapshotError(
            f"{path} is not a snapshot of PyTorch's allocator, or it is broken ({error!r:.200})"
        ) from error


def unpacked_size(path: Path) -> int:
    """Return the bytes of a file (of gzip by its last four bytes); 0 for a pipe. Raises OSError."""
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        packed = file.read(len(_GZIP)) == _GZIP
        size = file.seek(0, io.SEEK_END)
        if not packed or size < _GZIP_SIZE_BYTES:
            return size
        file.seek(-_GZIP_SIZE_BYTES, io.SEEK_END)
        return min(int.from_bytes(file.read(), "little"), LARGEST)


def limit_reading(file_size: int) -> None:
    """Limit memory and processor time of this process, until its end, to what files of this size may take.

    A key of 130 bytes can have so many parts that its hash takes years.
    """
    _limit(resource.RLIMIT_AS, _ADDRESS_SPACE + _ADDRESS_SPACE_PER_BYTE * file_size)
    _limit(resource.RLIMIT_CPU, _SECONDS + file_size // _BYTES_PER_SECOND)


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(what, (most, hard))


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise SnapshotError(f"it names {module_name!r:.80}.{global_name!r:.80}")

    def persistent_load(self, pid: object, /) -> NoReturn:
        del pid
        raise SnapshotError("it refers to an object outside the file")


@contextlib.contextmanager
def _limited_address_space(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (size, soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
