"""Make the text of other programs and users safe to show: it cannot control a terminal."""

from __future__ import annotations


def printable(text: str, replacement: str = "?") -> str:
    """Replace every character that is not printable: none may control a terminal or break an encoding."""
    return "".join(char if char.isprintable() else replacement for char in text)
