"""Read where a library's dynamic symbols lie in its file; it is a user's, so nothing in it is trusted."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_TABLE_BYTES = 2 * 2**20
"""The largest table of symbols or names that is read. Those of libcuda 580 have less than 100 KiB."""

MAX_NAME_BYTES = 128
"""The longest name that is read: many symbols may share the end of one long name."""

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

    Raises ElfError if it is not a 64-bit little-endian ELF file with dynamic symbols, or one of the wanted
    functions is chosen only when the library is loaded. Raises OSError if it cannot be read.
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
            end = names.find(b"\0", name_at, name_at + MAX_NAME_BYTES)
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


LAUNCH = re.compile(
    r"cu(?:LaunchKernel(?:Ex)?|LaunchCooperativeKernel(?:MultiDevice)?|Launch|LaunchGrid(?:Async)?|GraphLaunch)"
    r"(?:_v\d+)?(?:_pt[ds]s|_ptsz)?"
)
"""A kernel or a graph of kernels. The CUDA runtime, cuBLAS and every framework end in one of them: they get
their addresses from ``cuGetProcAddress``, and these are the addresses in the library's own table."""

TRANSFER = re.compile(
    r"cu(?:Memcpy(?!.*(?:GetAttribute|NodeSet))\w*|Memset[DU]\w+|MemPrefetch(?:Batch)?Async\w*"
    r"|MemDiscardAndPrefetchBatchAsync\w*|MemBatchDecompressAsync\w*)"
)
"""A copy, a memset, or a move of managed memory, in every form: ``_v2``, ``_ptds``, ``_ptsz``."""

_THIRTY_TWO_BITS = re.compile(
    r"cu(?:Memcpy(?:HtoD|DtoH|DtoD|DtoA|AtoD|HtoA|AtoH|AtoA|2D|3D)(?:Async)?|Memcpy2DUnaligned"
    r"|Memset(?:D|D2D)(?:8|16|32))"
)
"""Forms of CUDA 3.1 and older, with 32-bit addresses that none of today fits; libcuda 580 has 24."""

STREAM_MEMORY = re.compile(r"cuStream(?:Write|BatchMemOp)\w*")
"""A write into memory by a stream."""

_LIBRARY = re.compile(r"libcuda\.so(?:\.[\w.-]+)?")

_BYPASS = re.compile(
    r"lib(?:nvcuvid|nvidia-(?:encode|opencl|opticalflow|glcore|eglcore|vksc-core|glvkspirv)|nvoptix"
    r"|GLX_nvidia|EGL_nvidia|GLESv\w+_nvidia|vdpau_nvidia)\.so"
)
"""Video, OpenCL, OpenGL, Vulkan and OptiX reach the driver by other ways than the functions of libcuda."""


def submits_work(name: str) -> bool:
    """Tell whether a function of libcuda hands work to a GPU."""
    if _THIRTY_TWO_BITS.fullmatch(name):
        return False
    return any(pattern.fullmatch(name) for pattern in (LAUNCH, TRANSFER, STREAM_MEMORY))


def is_library(file_name: str) -> bool:
    """Tell whether a file's name is that of libcuda, in any version."""
    return _LIBRARY.fullmatch(file_name) is not None


def bypasses_library(file_name: str) -> bool:
    """Tell whether a library hands work to a GPU without the functions of libcuda."""
    return _BYPASS.match(file_name) is not None
