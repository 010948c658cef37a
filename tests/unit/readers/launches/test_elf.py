"""The functions of a library, read from a file that nobody vouches for."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vramledger.readers.launches.elf import ElfError, find_functions
from vramledger.readers.launches.uprobes import find_mappings


def functions_of(path: Path, wanted: Callable[[str], bool] = bool) -> dict[str, int]:
    """Return the functions of a file."""
    with path.open("rb") as file:
        return find_functions(file.fileno(), wanted)


@pytest.fixture(scope="module")
def own_library() -> tuple[Path, int, int]:
    """Return our C library, where it begins in our memory, and the address of one of its functions."""
    address = ctypes.cast(ctypes.CDLL(None).ether_ntoa, ctypes.c_void_p).value or 0
    for mapping in find_mappings(Path("/proc/self/maps").read_bytes()):
        if mapping.start <= address < mapping.end:
            return Path(mapping.path), mapping.start - mapping.offset, address
    message = "the C library is not mapped"
    raise AssertionError(message)


def test_offset_is_that_of_the_running_function(own_library: tuple[Path, int, int]) -> None:
    """The offset of a function in its file is where the loader has put it."""
    path, base, address = own_library

    assert functions_of(path, lambda name: name == "ether_ntoa") == {"ether_ntoa": address - base}


def test_function_that_is_chosen_at_load_is_refused(own_library: tuple[Path, int, int]) -> None:
    """A function with several implementations has no single place, and is not taken for one."""
    with pytest.raises(ElfError, match="is chosen when it is loaded"):
        functions_of(own_library[0], lambda name: name == "memcpy")


def test_imported_function_is_not_found() -> None:
    """A function that the file only uses is not one that it defines."""
    python = Path(sys.executable).resolve()

    assert functions_of(python, lambda name: name == "ether_ntoa") == {}


@pytest.mark.parametrize(
    "content", [b"", b"\x7fELF", b"#!/bin/sh\n", b"\x7fELF\x02\x01" + bytes(58), bytes(4096)]
)
def test_no_library(tmp_path: Path, content: bytes) -> None:
    """A file that is not a library is refused."""
    (tmp_path / "file").write_bytes(content)

    with pytest.raises(ElfError):
        functions_of(tmp_path / "file")


@pytest.mark.parametrize("seed", range(4))
def test_damaged_library(tmp_path: Path, own_library: tuple[Path, int, int], seed: int) -> None:
    """A damaged file gives functions or a refusal, and nothing else, however large its numbers are."""
    chance = random.Random(seed)  # noqa: S311 the same in each run
    whole = own_library[0].read_bytes()
    sections_at = int.from_bytes(whole[40:48], "little")
    path = tmp_path / "library"
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(chance.randint(1, 6)):
            begin = chance.choice((0, 64, sections_at))
            at = begin + chance.randrange(min(1024, len(data) - begin))
            data[at : at + 8] = chance.choice((b"\xff" * 8, bytes(8), chance.randbytes(8)))
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            offsets = functions_of(path, lambda name: name.startswith("ether"))
        except ElfError:
            continue
        assert all(0 <= offset < 2**63 for offset in offsets.values())


def test_names_without_an_end(tmp_path: Path, own_library: tuple[Path, int, int]) -> None:
    """A file that ends within its tables is refused."""
    whole = own_library[0].read_bytes()
    (tmp_path / "library").write_bytes(whole[: len(whole) // 2])

    with pytest.raises(ElfError, match="cut off"):
        functions_of(tmp_path / "library")


def library(names: bytes, symbols: list[int]) -> bytes:
    """Make a library whose functions have their names at these places of one table."""
    table = b"".join(struct.pack("<IBBHQQ", at, 0x12, 0, 1, 0x1000, 1) for at in symbols)
    sections = [(11, 64 + len(names), len(table), 1), (3, 64, len(names), 0)]
    headers = b"".join(
        struct.pack("<IIQQQQIIQQ", 0, kind, 0, 0, at, size, link, 0, 1, 0)
        for kind, at, size, link in sections
    )
    places = (0, 64 + len(names) + len(table), 0, 64, 56, 0, 64, len(sections), 0)
    header = b"\x7fELF\x02\x01" + bytes(10) + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, *places)
    return header + names + table + headers


def test_a_name_without_measure_is_read_by_nobody(tmp_path: Path) -> None:
    """Many functions that share one long name cost no more than as many short ones."""
    places = [*range(0, 2**20, 64), 2**20 + 1]
    (tmp_path / "library").write_bytes(library(b"x" * 2**20 + b"\0cuInit\0", places))
    asked: list[str] = []

    def is_wanted(name: str) -> bool:
        asked.append(name)
        return name == "cuInit"

    with pytest.raises(ElfError, match="cuInit lies outside"):
        functions_of(tmp_path / "library", is_wanted)
    assert max(map(len, asked)) < 128


@pytest.mark.parametrize("size", [2**21 + 1, 2**25])
def test_a_table_without_measure_is_refused(tmp_path: Path, size: int) -> None:
    """A table of names larger than that of any driver is not read."""
    (tmp_path / "library").write_bytes(library(b"x" * size, [0]))

    with pytest.raises(ElfError, match="too large"):
        functions_of(tmp_path / "library")


def test_device_is_refused() -> None:
    """A file that is not a regular file gives no functions."""
    descriptor = os.open("/dev/zero", os.O_RDONLY)
    try:
        with pytest.raises((ElfError, OSError)):
            find_functions(descriptor, bool)
    finally:
        os.close(descriptor)
