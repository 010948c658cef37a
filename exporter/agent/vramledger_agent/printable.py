"""Write texts for people: of other programs and users, so that none controls a terminal; bytes and spans."""

from __future__ import annotations

import sys

_GIB = 1024.0**3


def printable(text: str, replacement: str = "?") -> str:
    """Replace every character that is not printable: none may control a terminal or break an encoding."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else replacement for char in text)


class Control(str):
    """A control sequence of our own, which reaches the terminal as it is."""

    __slots__ = ()


def write_plain(*parts: str, error: bool = False, flush: bool = False) -> None:
    """Write text to stdout or stderr; line feeds and each :class:`Control` alone stay. Raises OSError."""
    shown = (
        each if isinstance(each, Control) else "\n".join(map(printable, each.split("\n"))) for each in parts
    )
    print("".join(shown), end="", file=sys.stderr if error else sys.stdout, flush=flush)


def gib(value: int | None) -> str:
    """Write bytes as GiB, or a dash when not known."""
    return "-" if value is None else f"{value / _GIB:.2f} GiB"


def span(seconds: float) -> str:
    """Write a span as its two largest units: ``3d 4h``, ``12m 5s``."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count}{unit}")
    return " ".join(parts[:2])
