"""Find which GPU frameworks a process has loaded, and what its environment tells their allocators.

Of the mapped files and of the environment we keep only what the frameworks' declarations name: no other path
and no other variable leaves this module.
"""

from __future__ import annotations

import re

from vramledger.readers.hosts.program_names import REPLACEMENT
from vramledger_agent.printable import printable
from vramledger_agent.protocol.frameworks import FRAMEWORKS
from vramledger_agent.protocol.messages import ENABLE_VARIABLE

MAPS_CAP = 8 * 1024 * 1024
"""A mapping takes about 120 bytes, and the kernel allows a process 65,530 of them by default."""

LONGEST_SETTING = 256

_LIBRARIES = [library for framework in FRAMEWORKS for library in framework.libraries]
LIBRARIES = tuple(library.name for library in _LIBRARIES)
"""Every value that ``ProcessFacts.libraries`` may hold."""

_LIBRARY_BY_STEM = {stem.encode(): library.name for library in _LIBRARIES for stem in library.stems}
_LIBRARY_BY_PROGRAM = {
    program.encode(): library.name for library in _LIBRARIES for program in library.programs
}
_PACKAGES = [library for library in _LIBRARIES if library.path]
_PACKAGE_MODULE = re.compile(
    "/(?:{})[^\\n]*\\.so$".format("|".join(f"({package.path})" for package in _PACKAGES)).encode()
)

SETTINGS = (
    *dict.fromkeys(setting.variable for framework in FRAMEWORKS for setting in framework.settings),
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_LOG_DIRECTORY",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_CLIENT_PRIORITY",
    ENABLE_VARIABLE,  # whether it was started with our agent
)
"""Variables that control GPU memory or our agent, in full: a prefix would accept unknown ones."""


def find_libraries(maps: bytes) -> tuple[str, ...]:
    """Return the libraries of frameworks that are in a ``maps``, in the order of :data:`LIBRARIES`."""
    # No text before the path has a slash, and a library is mapped in about five pieces.
    paths = {line.partition(b"/")[2] for line in maps.split(b"\n")}
    found: set[str] = set()
    for path in paths:
        file = b"/" + path.removesuffix(b" (deleted)")  # upgraded while the program runs
        name = file.rpartition(b"/")[2]
        stem, dot, _ = name.partition(b".so")
        library = _LIBRARY_BY_STEM.get(stem) if dot else _LIBRARY_BY_PROGRAM.get(name)
        if library is not None:
            found.add(library)
        elif dot and (match := _PACKAGE_MODULE.search(file)):
            found.add(_PACKAGES[(match.lastindex or 1) - 1].name)
    return tuple(library for library in LIBRARIES if library in found)


def find_settings(environment: bytes) -> tuple[tuple[str, str], ...]:
    """Return the allow-listed variables of an environment; the caller puts a zero byte in front of it.

    The first of several with one name counts, as for ``getenv``. Values are cut and made printable.
    """
    found = ((name, find_variable(environment, name, LONGEST_SETTING)) for name in SETTINGS)
    return tuple((name, value) for name, value in found if value is not None)


def find_variable(environment: bytes, name: str, longest: int) -> str | None:
    """Return a variable, cut and printable, of an environment with a zero byte in front of it, or None."""
    mark = b"\0" + name.encode() + b"="
    begin = environment.find(mark)
    if begin < 0:
        return None
    begin += len(mark)
    # Cut before searching for the end, and at four bytes a character at most.
    value = environment[begin : begin + 4 * longest].partition(b"\0")[0]
    return printable(value.decode(errors="replace"), REPLACEMENT)[:longest]


def names_framework(libraries: tuple[str, ...] | None) -> bool:
    """Say whether the libraries name a framework, or whether more may be loaded yet."""
    return libraries is not None and any(library != "libcuda" for library in libraries)
