"""Read where the functions of a shared library lie in its file: its dynamic symbols, and no more.

The file belongs to the user whose program has mapped it, so nothing in it is trusted.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_TABLE_BYTES = 32 * 2**20
"""The largest table of symbols or names that is read. Those of libcuda 580 have less than 100 KiB."""

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_MAGIC = b"\x7fELF\x02\x01"
_LOADED, _EXECUTABLE, _DYNAMIC_SYMBOLS = 1, 1, 11
_FUNCTION, _INDIRECT_FUNCTION, _UNDEFINED = 2, 10, 0
_LOCAL = 0
_FILE_END = 2**62
"""No file is as long; the kernel takes offsets below 2**63."""


class ElfError(Exception):
    """The file is not a shared library whose functions can be found."""


class _ElfSection(NamedTuple):
    """The fields of a section that are needed here."""

    kind: int
    offset: int
    size: int
    link: int


def find_functions(descriptor: int, wanted: Callable[[str], bool]) -> dict[str, int]:
    """Return the file offsets of the wanted functions that an open ELF file defines, by name.

    Names with the same offset are the same function.

    Raises:
        ElfError: it is not a 64-bit little-endian ELF file with dynamic symbols, or one of the wanted
            functions is chosen only when the library is loaded.
        OSError: it cannot be read.
    """
    header = _read(descriptor, 0, _HEADER.size)
    fields = _HEADER.unpack(header)
    if not fields[0].startswith(_MAGIC):
        message = "it is not a 64-bit ELF file"
        raise ElfError(message)
    segments_at, sections_at = fields[5], fields[6]
    segment_size, segment_count, section_size, section_count = fields[9:13]
    if segment_size != _SEGMENT.size or section_size != _SECTION.size:
        message = "its tables have another form"
        raise ElfError(message)
    segments = [
        each
        for each in _SEGMENT.iter_unpack(_read(descriptor, segments_at, segment_count * segment_size))
        if each[0] == _LOADED and each[1] & _EXECUTABLE
    ]
    sections = [
        _ElfSection(each[1], each[4], each[5], each[6])
        for each in _SECTION.iter_unpack(_read(descriptor, sections_at, section_count * section_size))
    ]
    found: dict[str, int] = {}
    for name, kind, value in _symbols(descriptor, sections):
        if not wanted(name):
            continue
        if kind == _INDIRECT_FUNCTION:
            message = f"its {name} is chosen when it is loaded"
            raise ElfError(message)
        for segment in segments:
            _, _, offset, address, _, size_in_file, _, _ = segment
            if address <= value < address + size_in_file and value - address + offset < _FILE_END:
                found[name] = value - address + offset
                break
        else:
            message = f"its {name} lies outside its code"
            raise ElfError(message)
    return found


def _symbols(descriptor: int, sections: list[_ElfSection]) -> Iterator[tuple[str, int, int]]:
    """Yield name, kind and address of each function that the file defines for others."""
    for section in sections:
        if section.kind != _DYNAMIC_SYMBOLS:
            continue
        if section.link >= len(sections) or section.size % _SYMBOL.size:
            message = "its symbols are damaged"
            raise ElfError(message)
        names = _read(descriptor, sections[section.link].offset, sections[section.link].size)
        table = _read(descriptor, section.offset, section.size)
        for name_at, info, _, home, value, _ in _SYMBOL.iter_unpack(table):
            kind = info & 15
            if kind not in (_FUNCTION, _INDIRECT_FUNCTION) or home == _UNDEFINED or info >> 4 == _LOCAL:
                continue
            end = names.find(b"\0", name_at)
            if end > name_at:
                yield names[name_at:end].decode("ascii", "replace"), kind, value
        return
    message = "it has no table of symbols"
    raise ElfError(message)


def _read(descriptor: int, offset: int, size: int) -> bytes:
    if size > MAX_TABLE_BYTES or offset >= _FILE_END:
        message = "its tables are too large"
        raise ElfError(message)
    data = os.pread(descriptor, size, offset)
    if len(data) != size:
        message = "it is cut off"
        raise ElfError(message)
    return data
