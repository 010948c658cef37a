"""Make text of other programs and users harmless where it is shown."""

from __future__ import annotations


def printable(text: str, replacement: str = "?") -> str:
    """Replace every character that is not printable: none may control a terminal or break an encoding."""
    return "".join(char if char.isprintable() else replacement for char in text)
