"""Classify why an allocation failed: a pure function over what was known at that moment."""

from __future__ import annotations

from typing import NamedTuple

TOO_BIG = "too_big"
FRAGMENTED = "fragmented"
HOARDED = "hoarded"
LEAKING = "leaking"
UNKNOWN = "unknown"

CONTEXT_SHARE = 0.02
"""Contexts and libraries may take this share of a device; more counts as hoarding."""

MIN_LEAK_SHARE = 0.1
"""A leak that matters has taken at least this share of the device."""


MIN_PIECES_SHARE = 0.01
"""Free pieces below this share of what the process could have are not the reason: the memory is full."""


class AllocationFailure(NamedTuple):
    """What was known when an allocation failed; bytes, None where not known."""

    requested: int  # what the program tried to allocate
    capacity: int  # of the device, or what the process may use of it
    free: int  # on the device
    reserved: int | None = None  # by this process's allocator
    active: int | None = None  # the part of ``reserved`` that is in use
    largest_free: int | None = None  # block in the allocator's cache
    others: int | None = None  # what other processes hold on the device
    # the rise of the minimum of the allocated bytes, 0 when it does not rise steadily
    leaked: int | None = None
    limited: bool = False  # the process has a limit of its own, below the device's size
    device_total: int | None = None  # bytes of the device, also where the process has a limit below it
    held: int | None = None  # what this process holds there, with its context, as the exporter last saw it


def classify(failure: AllocationFailure) -> str:
    """Return the one verdict that the facts prove, :data:`UNKNOWN` when they prove none.

    The order is: an allocation that could never fit; one that would fit if the free memory were in one piece;
    one whose memory another process took; one whose memory a leak took; one that is simply too big. The
    allocator frees its whole free segments before it fails, so what is left in its cache is pieces. If more
    than these pieces has leaked, the verdict is a leak: a leak also ends with free pieces that are just too
    small (seen on an H200).
    """
    if failure.requested > failure.capacity:
        return TOO_BIG
    if failure.reserved is None or failure.active is None:
        return UNKNOWN
    leaked = failure.leaked or 0
    if leaked < MIN_LEAK_SHARE * failure.capacity:
        leaked = 0
    cached = failure.reserved - failure.active
    # Of a device with a limit for this process, CUDA reports the limit as its capacity, but as free what is
    # free for all processes (seen on an H200: "8 GiB, of which 72 are free").
    room = max(0, failure.capacity - failure.reserved)
    if _would_fit_in_pieces(failure, cached + min(room, failure.free)) and cached >= leaked:
        return FRAGMENTED
    if room < failure.requested:  # even if no other process held anything
        return LEAKING if leaked else TOO_BIG
    return _classify_with_others(failure, failure.reserved, leaked)


def _classify_with_others(failure: AllocationFailure, reserved: int, leaked: int) -> str:
    others = _present_bytes_of_others(failure, reserved)
    if others is None:
        return _classify_without_others(failure, reserved, leaked)
    missing = failure.requested - failure.free
    if others > CONTEXT_SHARE * failure.capacity and others >= missing and others >= leaked:
        return HOARDED
    return LEAKING if leaked else TOO_BIG


def _would_fit_in_pieces(failure: AllocationFailure, free: int) -> bool:
    """Return whether the free bytes of cache and device would be enough, but not in one piece."""
    in_use = failure.active or 0
    return free >= max(failure.requested, MIN_PIECES_SHARE * (in_use + free)) and (
        failure.largest_free is None or failure.largest_free < failure.requested
    )


def _present_bytes_of_others(failure: AllocationFailure, reserved: int) -> int | None:
    """Return what others hold now: at most what is neither free nor ours, as a holder may have ended."""
    if failure.others is None or failure.device_total is None:
        return failure.others
    ours = max(reserved, failure.held or 0)
    return min(failure.others, max(0, failure.device_total - failure.free - ours))


def _classify_without_others(failure: AllocationFailure, reserved: int, leaked: int) -> str:
    """Classify without the bytes of other processes: only if these cannot have been the reason."""
    elsewhere = failure.capacity - failure.free - reserved
    missing = failure.requested - failure.free
    if elsewhere > CONTEXT_SHARE * failure.capacity and elsewhere >= max(missing, leaked):
        return UNKNOWN
    return LEAKING if leaked else TOO_BIG
