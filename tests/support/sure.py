"""What a test must have before it can look at it."""

from typing import TypeVar

T = TypeVar("T")


def sure(value: T | None) -> T:
    """Return a value that must be known."""
    assert value is not None
    return value
