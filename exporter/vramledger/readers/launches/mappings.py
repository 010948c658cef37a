"""Find what files a program has mapped as code."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

_MAPPING = re.compile(rb"^([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) \S+ \d+ +(/.*)$", re.MULTILINE)


class Mapping(NamedTuple):
    """A part of a file that a program has mapped as code."""

    start: int
    end: int
    offset: int
    path: str

    def holds(self, offset: int) -> bool:
        """Tell whether it contains an offset of the file."""
        return self.offset <= offset < self.offset + self.end - self.start


def find_mappings(maps: bytes) -> Iterator[Mapping]:
    """Yield the code of files that a ``maps`` shows."""
    for start, end, rights, offset, path in _MAPPING.findall(maps):
        if b"x" in rights:
            yield Mapping(int(start, 16), int(end, 16), int(offset, 16), os.fsdecode(path))
