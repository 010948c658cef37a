"""Allocation snapshots in words, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from vramledger.printable import printable
from vramledger.torch_snapshots.sites import OLDER, Difference, sites
from vramledger.torch_snapshots.snapshot import AllocationSnapshot, Device
from vramledger.torch_snapshots.user_lines import Frame, Stack

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_CALLERS = 3


def amount(value: int) -> str:
    """Write bytes in the unit that fits: ``512 B``, ``1.5 MiB``; a sign is kept."""
    size = float(value)
    unit = 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def where(frame: Frame | str | None) -> str:
    """Write a place."""
    return OLDER if frame is None else printable(str(frame))


def listing(snapshot: AllocationSnapshot, *, top: int = 20) -> str:
    """Write live bytes by the place that allocated them."""
    return "".join(f"{line}\n" for line in _listing(snapshot, top))


def _listing(snapshot: AllocationSnapshot, top: int) -> Iterator[str]:
    if not snapshot.devices:
        yield "PyTorch's allocator held nothing."
    for device in snapshot.devices:
        yield heading(device)
        found = sites(block for block in snapshot.blocks if block.device == device.number)
        yield from _rows(
            [(site.size, site.blocks, site.place, site.callers) for site in found[:top]], ("BYTES", "COUNT")
        )
        if rest := found[top:]:
            size, count = sum(site.size for site in rest), sum(site.blocks for site in rest)
            yield f"{amount(size):>12}  {count:>7}  ({len(rest)} more places)"
    yield recording(snapshot)


def heading(device: Device) -> str:
    """Write what a device's allocator held in all."""
    return (
        f"device {device.number}: {amount(device.allocated)} live of {amount(device.reserved)} reserved;"
        f" the largest free block has {amount(device.largest_free)}"
    )


def recording(snapshot: AllocationSnapshot) -> str:
    """Write what the events cover."""
    if not snapshot.events:
        return "No history was recorded with it, so nothing tells how it came about."
    seconds = snapshot.recorded
    return f"{len(snapshot.events):,} events" + (f" in {seconds:.1f} s" if seconds is not None else "")


def _rows(
    rows: list[tuple[int, int, Frame | None, Stack]], head: tuple[str, str], sign: str = ""
) -> Iterator[str]:
    if not rows:
        return
    yield f"{head[0]:>12}  {head[1]:>7}  WHERE"
    for size, count, frame, callers in rows:
        yield f"{format_signed(size, sign):>12}  {count:>{sign}7,}  {where(frame)}"
        for caller in callers[:_CALLERS]:
            yield f"{'':>12}  {'':>7}    from {where(caller)}"


def format_signed(value: int, sign: str) -> str:
    """Write bytes, with a plus where one is wanted."""
    return ("+" if sign and value > 0 else "") + amount(value)


def comparison(difference: Difference, *, top: int = 20) -> str:
    """Write which places grew."""
    return "".join(f"{line}\n" for line in _comparison(difference, top))


def _comparison(difference: Difference, top: int) -> Iterator[str]:
    change = difference.after - difference.before
    yield (
        f"live bytes: {amount(difference.before)} before, {amount(difference.after)} after"
        f" ({format_signed(change, '+')})"
    )
    if not difference.grown:
        yield "No place of the program holds more than before."
    yield from _rows(
        [
            (growth.size, growth.blocks, growth.site.place, growth.site.callers)
            for growth in difference.grown[:top]
        ],
        ("GREW BY", "COUNT"),
        "+",
    )
    if rest := difference.grown[top:]:
        size = sum(growth.size for growth in rest)
        yield f"{format_signed(size, '+'):>12}  {'':>7}  ({len(rest)} more places)"
    if difference.older > 0:
        yield f"{format_signed(difference.older, '+'):>12}  {'':>7}  (allocated while nothing was recorded)"
    if difference.through is not None:
        yield f"nine tenths of the growth or more came through {where(difference.through)}"
