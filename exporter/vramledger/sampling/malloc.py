"""How a process that runs for months asks the C library for little memory, and frees what it can.

C libraries other than glibc have none of these functions, and are left alone.
"""

from __future__ import annotations

import ctypes
import gc

_ARENA_MAX = -8

FREE_INTERVAL = 60.0
"""Seconds between two calls of :func:`free_unused`, which takes 2 ms for 8 GPUs with 64 holders each."""


def use_one_arena() -> None:
    """Have all threads share one heap; by default each gets one of its own, and each is partly empty.

    The interpreter's lock leaves little to be gained from several. To be called before there are threads.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, 1)


def freeze_objects() -> None:
    """Say that what is loaded by now stays for good, so that no search for garbage goes through it again."""
    gc.collect()
    gc.freeze()
    _trim_heap()


def free_unused() -> None:
    """Free unused memory to the system: glibc by itself frees only what is at its heap's end.

    A whole search for garbage goes before, for it is the only thing that empties CPython's lists of free
    tuples: up to 2,000 of each length, 4 MiB in all. They fill for an hour, which looks like a leak, and
    lie about in memory that could be empty. By itself such a search hardly ever comes, for next to nothing
    here has cycles.
    """
    gc.collect()
    _trim_heap()


def _trim_heap() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
