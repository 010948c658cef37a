"""Classify why an allocation failed: a pure function over what was known at that moment."""

from __future__ import annotations

TOO_BIG = "too_big"
FRAGMENTED = "fragmented"
HOARDED = "hoarded"
LEAKING = "leaking"
UNKNOWN = "unknown"

CONTEXT_SHARE = 0.02
"""Contexts and libraries may take this share of a device; more counts as hoarding."""

MIN_LEAK_SHARE = 0.1
"""A leak that matters has taken at least this share of the device."""


class AllocationFailure:
    """What was known when an allocation failed; bytes, None where not known.

    Attributes:
        requested: what the program tried to allocate.
        capacity: of the device, or what the process may use of it.
        limited: the process has a limit of its own, below the device's size.
        free: on the device.
        reserved: by this process's allocator.
        active: the part of ``reserved`` that is in use.
        largest_free: block in the allocator's cache.
        others: what other processes hold on the device.
        leaked: the rise of the minimum of the allocated bytes, 0 when it does not rise steadily.
    """

    __slots__ = (
        "active",
        "capacity",
        "free",
        "largest_free",
        "leaked",
        "limited",
        "others",
        "requested",
        "reserved",
    )

    def __init__(  # noqa: PLR0913
        self,
        *,
        requested: int,
        capacity: int,
        free: int,
        reserved: int | None = None,
        active: int | None = None,
        largest_free: int | None = None,
        others: int | None = None,
        leaked: int | None = None,
        limited: bool = False,
    ) -> None:
        self.requested = requested
        self.capacity = capacity
        self.limited = limited
        self.free = free
        self.reserved = reserved
        self.active = active
        self.largest_free = largest_free
        self.others = others
        self.leaked = leaked


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
    if _would_fit_in_pieces(failure, failure.reserved, cached) and cached >= leaked:
        return FRAGMENTED
    others = 0 if failure.limited else failure.others
    if others is None:
        return _classify_without_others(failure, failure.reserved, leaked)
    missing = failure.requested - failure.free
    if others > CONTEXT_SHARE * failure.capacity and others >= missing and others >= leaked:
        return HOARDED
    return LEAKING if leaked else TOO_BIG


def _would_fit_in_pieces(failure: AllocationFailure, reserved: int, cached: int) -> bool:
    """Return whether the free bytes of cache and device would be enough, but not in one piece."""
    room = max(0, failure.capacity - reserved) if failure.limited else failure.free
    if cached + min(room, failure.free) < failure.requested:
        return False
    return failure.largest_free is None or failure.largest_free < failure.requested


def _classify_without_others(failure: AllocationFailure, reserved: int, leaked: int) -> str:
    """Classify without the bytes of other processes: only if these cannot have been the reason."""
    elsewhere = failure.capacity - failure.free - reserved
    missing = failure.requested - failure.free
    if elsewhere > CONTEXT_SHARE * failure.capacity and elsewhere >= max(missing, leaked):
        return UNKNOWN
    return LEAKING if leaked else TOO_BIG
