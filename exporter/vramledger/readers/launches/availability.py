"""Find out whether the kernel and our rights let us count calls, by counting one of our own."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from vramledger.readers.launches.mappings import Mapping, find_mappings
from vramledger.readers.launches.uprobes import explain, open_counter, read_counter, uprobe_type


def find_obstacle(root: str) -> str:
    """Say why the calls of programs cannot be counted here; empty if they can.

    Args:
        root: where the proc file system is mounted.
    """
    try:
        pmu = uprobe_type()
    except (OSError, ValueError):
        return "the kernel has no uprobes for perf_event_open (it needs Linux 5.8 or newer)"
    function = ctypes.CDLL(None).ether_ntoa  # every C library has it, and we call it nowhere else
    address = ctypes.cast(function, ctypes.c_void_p).value or 0
    try:
        library = _mapping_of(root, address)
        if library is None:
            return "our own C library was not found in our memory"
        offset = address - library.start + library.offset
        counter = open_counter(pmu, library.path, offset, os.getpid())
    except OSError as error:
        return explain(error)
    try:
        function(ctypes.create_string_buffer(6))
        return "" if read_counter(counter) == 1 else "the kernel does not count a call that we made"
    finally:
        os.close(counter)


def _mapping_of(root: str, address: int) -> Mapping | None:
    mappings = find_mappings(Path(f"{root}/self/maps").read_bytes())
    return next((each for each in mappings if each.start <= address < each.end), None)
