"""Unused memory is freed."""

import sys

from vramledger.sampling import malloc


def test_lists_of_free_tuples_are_emptied() -> None:
    """CPython keeps thousands of unused tuples; after a call they are free memory again."""
    kept = 1500
    rows = [tuple(range(number, number + 15)) for number in range(kept)]
    del rows
    before = sys.getallocatedblocks()
    malloc.free_unused()
    assert before - sys.getallocatedblocks() > kept / 2
