"""The agent's thread: it exists while an allocator does, and never across a fork."""

from __future__ import annotations


def stop() -> None:
    """End the thread and let go of the socket."""
