"""In which order the files of tests begin."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import TypeVar

File = TypeVar("File")


def order_of_files(limits: Mapping[File, float], waiting: Collection[File]) -> list[File]:
    """Return the files, first those that may take longest, and in turn one that waits and one that computes.

    So neither all workers wait nor all compute, and no worker begins a long file when all others are done.

    Args:
        limits: the seconds of the longest limit of each file.
        waiting: the files that wait more than they compute.
    """
    files = sorted(limits, key=lambda file: -limits[file])
    waits = [file for file in files if file in waiting]
    computes = [file for file in files if file not in waiting]
    pairs = zip_longest(waits, computes)
    return [file for pair in pairs for file in pair if file is not None]
