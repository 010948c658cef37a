"""Write allocation snapshots as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterator

from vramledger.printable import printable
from vramledger.torch_snapshots.sites import OLDER, SnapshotDifference, sum_by_site
from vramledger.torch_snapshots.snapshot import AllocationSnapshot, Device
from vramledger.torch_snapshots.user_lines import Frame, Stack

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_STEP = 1024
_CALLERS = 3


def size_text(value: int) -> str:
    """Write bytes in the unit that fits: ``512 B``, ``1.5 MiB``; a sign is kept."""
    size = float(value)
    unit = 0
    while abs(size) >= _STEP and unit < len(_UNITS) - 1:
        size /= _STEP
        unit += 1
    return f"{size:.0f} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def frame_text(frame: Frame | str | None) -> str:
    """Write a line of code; another person may have chosen the file name in the recording."""
    return OLDER if frame is None else printable(str(frame))


def snapshot_text(snapshot: AllocationSnapshot, *, top: int = 20) -> str:
    """Write live bytes by the line that allocated them."""
    return "".join(f"{line}\n" for line in _snapshot_lines(snapshot, top))


def _snapshot_lines(snapshot: AllocationSnapshot, top: int) -> Iterator[str]:
    if not snapshot.devices:
        yield "PyTorch's allocator held nothing."
    for device in snapshot.devices:
        yield device_text(device)
        found = sum_by_site(block for block in snapshot.blocks if block.device == device.number)
        yield from _site_lines(
            [(site.size, site.blocks, site.frame, site.callers) for site in found[:top]], ("BYTES", "COUNT")
        )
        if rest := found[top:]:
            size, count = sum(site.size for site in rest), sum(site.blocks for site in rest)
            yield f"{size_text(size):>12}  {count:>7}  ({len(rest)} more places)"
    yield recording_text(snapshot)


def device_text(device: Device) -> str:
    """Write the totals of a device's allocator."""
    live, reserved = size_text(device.allocated), size_text(device.reserved)
    return (
        f"device {device.number}: {live} live of {reserved} reserved;"
        f" the largest free block has {size_text(device.largest_free)}"
    )


def recording_text(snapshot: AllocationSnapshot) -> str:
    """Write the time and number of the events."""
    if not snapshot.events:
        return "No history was recorded with it, so how it came about is not known."
    seconds = snapshot.recorded
    return f"{len(snapshot.events):,} events" + (f" in {seconds:.1f} s" if seconds is not None else "")


def _site_lines(
    rows: list[tuple[int, int, Frame | None, Stack]], head: tuple[str, str], sign: str = ""
) -> Iterator[str]:
    if not rows:
        return
    yield f"{head[0]:>12}  {head[1]:>7}  WHERE"
    for size, count, frame, callers in rows:
        yield f"{signed_size_text(size, sign):>12}  {count:>{sign}7,}  {frame_text(frame)}"
        for caller in callers[:_CALLERS]:
            yield f"{'':>12}  {'':>7}    from {frame_text(caller)}"


def signed_size_text(value: int, sign: str) -> str:
    """Write bytes, with a plus sign if ``sign`` says so."""
    return ("+" if sign and value > 0 else "") + size_text(value)


def difference_text(difference: SnapshotDifference, *, top: int = 20) -> str:
    """Write which lines hold more than before."""
    return "".join(f"{line}\n" for line in _difference_lines(difference, top))


def _difference_lines(difference: SnapshotDifference, top: int) -> Iterator[str]:
    change = difference.after - difference.before
    yield (
        f"live bytes: {size_text(difference.before)} before, {size_text(difference.after)} after"
        f" ({signed_size_text(change, '+')})"
    )
    if not difference.grown:
        yield "No place of the program holds more than before."
    yield from _site_lines(
        [
            (growth.size, growth.blocks, growth.site.frame, growth.site.callers)
            for growth in difference.grown[:top]
        ],
        ("GREW BY", "COUNT"),
        "+",
    )
    if rest := difference.grown[top:]:
        size = sum(growth.size for growth in rest)
        yield f"{signed_size_text(size, '+'):>12}  {'':>7}  ({len(rest)} more places)"
    if difference.older > 0:
        older = signed_size_text(difference.older, "+")
        yield f"{older:>12}  {'':>7}  (allocated while nothing was recorded)"
    if difference.through is not None:
        yield f"nine tenths of the growth or more came through {frame_text(difference.through)}"
