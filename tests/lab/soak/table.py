"""The result of a soak, as a table for people."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One figure; ``good`` is None if it is not judged."""

    what: str
    figure: str
    good: bool | None


def markdown(rows: Iterable[Row]) -> Iterator[str]:
    yield "| what | figure | |"
    yield "|---|---|---|"
    for row in rows:
        verdict = {None: "", True: "good", False: "**bad**"}[row.good]
        yield f"| {row.what} | {row.figure} | {verdict} |"
