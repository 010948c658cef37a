"""In which order the files of tests begin, and which of them stay together on one worker."""

from collections.abc import Collection, Mapping
from itertools import zip_longest
from typing import TypeVar

File = TypeVar("File")

SHARING = ("tests/integration/dashboards/answers",)
"""Folders whose files share servers that take long to start."""
SEEN = {"tests/integration/deploy/test_real_slurm.py": "tests/integration/deploy/test_slurm.py"}
"""Files whose programs another one would see: a container may belong to any job of the host."""


def unit_of(nodeid: str) -> str:
    """Return what stays together on one worker with a test: its file, another one, or a folder."""
    file = nodeid.partition("::")[0]
    file = SEEN.get(file, file)
    return next((folder for folder in SHARING if file.startswith(f"{folder}/")), file)


def order_of_files(limits: Mapping[File, float], waiting: Collection[File]) -> list[File]:
    """Return the files, first those that may take longest, and in turn one that waits and one that computes.

    ``limits`` are the seconds of the longest limit of each file.
    """
    files = sorted(limits, key=lambda file: -limits[file])
    waits = [file for file in files if file in waiting]
    computes = [file for file in files if file not in waiting]
    pairs = zip_longest(waits, computes)
    return [file for pair in pairs for file in pair if file is not None]
