"""Say why a figure or a row is not there: nothing to report, no agent, no driver, not watched, no rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.src.queries import selector
from vramledger.views.colours import GRAFANA

NOTHING, NO_SOURCE, STOPPED, NO_DRIVER, NOT_WATCHED, NO_RULES = range(-1, -7, -1)
NO_HOLDER, NOT_YET, NO_DEVICE = range(-7, -10, -1)
"""The values that stand for a figure that is not there; all but the last four are those of the record."""

SOURCES = {
    "node": "not watched",
    "agent": "no agent",
    "need": "no need",
    "sensor": "no sensor",
    "counters": "no counters",
    "scheduler": "no scheduler",
    "limit": "no limit",
    "device": "no GPU",
    "holder": "no holder",
    "socket": "no socket",
}
"""What a figure may need of a node, and the words for a watched node that lacks it."""

WORDS = {
    STOPPED: ("stalled", GRAFANA["unattributed"]),
    NO_DRIVER: ("no driver", GRAFANA["orphaned"]),
    NOT_WATCHED: ("not watched", GRAFANA["dead"]),
    NO_RULES: ("no rules", GRAFANA["orphaned"]),
    NO_HOLDER: ("no holder", "text"),
    NOT_YET: ("not known yet", GRAFANA["unknown"]),
    NO_DEVICE: ("no GPU answers", GRAFANA["orphaned"]),
}


def missing(source: str) -> str:
    """Return the code of each node: :data:`NOTHING` where it has the source, else what is missing."""
    return selector("vramledger_node:missing:code", f'source="{source}"')


@dataclass(frozen=True, slots=True)
class Needs:
    """What a figure needs, so that it can say why it is not there.

    Attributes:
        source: what a node must have, of :data:`SOURCES`.
        nothing: what no figure means where all of that is there.
        first: codes of :data:`WORDS` with a query that has a result unless the code is the reason.
    """

    source: str = "node"
    nothing: str = "none"
    first: Sequence[tuple[int, str]] = ()

    @property
    def words(self) -> dict[object, tuple[str, str]]:
        """The words for the values of :func:`or_why`, with their colours."""
        said: dict[object, tuple[str, str]] = {
            NOTHING: (self.nothing, "text"),
            NO_SOURCE: (SOURCES[self.source], GRAFANA["unknown"]),
        }
        codes = [code for code, _ in self.first]
        return {**said, **{code: WORDS[code] for code in (*codes, STOPPED, NO_DRIVER, NOT_WATCHED)}}


def or_why(figure: str, needs: Needs, *, labelled: bool = False) -> str:
    """Return a figure, or several that are ``labelled``, or the code of why there is none."""
    known = f"max({missing(needs.source)})"
    first = [f"({code} + 0 * {known} unless on () {there})" for code, there in needs.first]
    return f"\nor {'on () ' if labelled else ''}".join([figure, *first, known])


def or_what_is_missing(rows: str, source: str) -> str:
    """Return rows of a table; without any, one with the code of what is missing, and none if nothing is."""
    codes = missing(source)
    return f"{rows}\nor on () (max({codes}) < {NOTHING})\nor on () {NO_RULES} * absent({codes})"
