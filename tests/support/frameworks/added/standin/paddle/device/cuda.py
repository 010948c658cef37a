"""A pool of 3 GiB, of which the program uses one and has used two."""

GIB = 2**30


def memory_reserved() -> int:
    """Return what the pool has taken."""
    return 3 * GIB


def memory_allocated() -> int:
    """Return what is in use."""
    return GIB


def max_memory_allocated() -> int:
    """Return the highest number of bytes in use."""
    return 2 * GIB
