"""Text of other programs and users, made harmless where it is shown."""

from __future__ import annotations


def printable(text: str, replacement: str = "?") -> str:
    """Replace every character that is not printable: none may steer a terminal or break an encoding."""
    return "".join(char if char.isprintable() else replacement for char in text)
