"""A boundary of an alert, and the ways to make one: what ``boundaries.py`` is a table of."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from tests.support.alerts.nodes import Holder, Node, Values, changing_at
from tests.support.host.model import GIB

V = TypeVar("V")

BYTE = 1 / GIB
"""In GiB. Bytes are whole, so at a share the holder of the byte above it is named."""


@dataclass(frozen=True)
class Boundary:
    """A rule at one of its thresholds."""

    rule: str  # the alert, its severity, and what else tells it from another rule of the name
    threshold: str  # its name in ``thresholds.yml``, or what is asked where it is a yes or a no
    quiet: Node  # a node just on the quiet side
    fires: Node  # a node at the threshold or just beyond it
    # The minute from which the condition holds there; None where that is not a whole minute, as with growth,
    # which on the quiet side may look like more while it begins, and must not fire.
    begins: float | None = 0.0
    minutes: float = 1.0  # how long the nodes are watched, besides ``begins`` and what the rule waits


def between(
    rule: str, threshold: str, node: Callable[[V], Node], quiet: V, fires: V, **more: float
) -> Boundary:
    """Return the boundary between nodes of two values; ``more`` are ``begins`` and ``minutes``."""
    return Boundary(rule, threshold, node(quiet), node(fires), **more)


def shown(rule: str, threshold: str, series: str, quiet: Values, fires: Values, **more: float) -> Boundary:
    """Return the boundary between two values of a series."""
    return between(rule, threshold, lambda values: Node(extra={series: values}), quiet, fires, **more)


def changes(  # noqa: PLR0913, PLR0917 a row of a table
    rule: str, threshold: str, series: str, before: float, after: float, minute: float = 5
) -> Boundary:
    """Return the boundary between a series that stays as it is, and one that changes at a minute."""
    return shown(rule, threshold, series, before, changing_at(minute, before, after), begins=minute)


def around(
    rule: str, threshold: str, node: Callable[[float], Node], gib: float, above: float = 0, **more: float
) -> Boundary:
    """Return the boundary between the byte below a number of GiB and that number, or what is ``above`` it."""
    return between(rule, threshold, node, gib - BYTE, gib + above, **more)


def holding(holder: Holder, *others: Holder, total: float = 100, gpus: int = 1) -> Callable[[float], Node]:
    """Return nodes on which a holder has a number of GiB, beside others."""
    return lambda gib: Node([replace(holder, gib=gib), *others], total=total, gpus=gpus)
