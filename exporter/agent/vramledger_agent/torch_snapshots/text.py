"""Write a snapshot as text: where the memory was allocated, and what the agent adds about the training."""

from __future__ import annotations

from collections.abc import Iterator

from vramledger_agent.printable import printable
from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import PHASES
from vramledger_agent.torch_snapshots.sites import OLDER, SnapshotDifference, sum_by_site
from vramledger_agent.torch_snapshots.snapshot import (
    AllocationSnapshot,
    Device,
    DeviceTraining,
    Garbage,
    Training,
    TrainingStep,
)
from vramledger_agent.torch_snapshots.user_lines import Frame, Stack

SHOWN_STEPS = 8


def training_text(training: Training, *, top: int = 20) -> str:
    return "".join(f"{line}\n" for line in _training_lines(training, top))


def _training_lines(training: Training, top: int) -> Iterator[str]:
    for device in training.devices:
        yield from _step_lines(device)
        yield from _type_lines(device)
    total = sum(training.forward_types.values())
    if total:
        shares = sorted(training.forward_types.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{size / total:.0%} {printable(name)}" for name, size in shares)
        yield f"results of the forward operations: {parts}"
    if training.garbage is not None:
        yield from _garbage_lines(training.garbage, top)


def _step_lines(device: DeviceTraining) -> Iterator[str]:
    steps = device.steps[-SHOWN_STEPS:]
    if not any(step.finished for step in steps):
        return
    yield f"device {device.device}: peaks within the last steps"
    yield f"{'STEP':>12}  " + "  ".join(f"{name.upper():>12}" for name in PHASES)
    for number, step in enumerate(steps, start=1 - len(steps)):
        cells = [size_text(step.peaks[name].size) if name in step.peaks else "-" for name in PHASES]
        name = str(number) if step.finished else "unfinished"
        yield f"{name:>12}  " + "  ".join(f"{cell:>12}" for cell in cells) + _remark(step)
    last = next(step for step in reversed(steps) if step.finished)
    peaks = last.peaks
    if not any(peak.categories for peak in peaks.values()):
        yield "what these peaks were for is not known: 'vramledger-agent snapshot PID --step' finds out"
        return
    yield "what the peaks of the last finished step were for"
    for category in CATEGORIES:
        cells = [
            size_text(peaks[name].categories[category])
            if name in peaks and category in peaks[name].categories
            else "-"
            for name in PHASES
        ]
        yield f"{category:>12}  " + "  ".join(f"{cell:>12}" for cell in cells)
    if last.gradients_before:
        yield (
            f"{size_text(last.gradients_before)} of gradients existed before the backward pass: zero_grad()"
            " is missing, is called with set_to_none=False, gradients are accumulated on purpose, or DDP"
            " keeps them in buckets (gradient_as_bucket_view)."
        )


def _remark(step: TrainingStep) -> str:
    batch = f"  batch {step.batch:,}" if step.batch is not None else ""
    return batch + ("" if step.whole or not step.finished else "  (its beginning was not recorded)")


def _type_lines(device: DeviceTraining) -> Iterator[str]:
    if device.types:
        yield f"device {device.device}: by dtype"
    for category, types in device.types.items():
        found = ", ".join(f"{size_text(size)} {printable(name)}" for name, size in sorted(types.items()))
        yield f"{printable(category):>12}  {found}"


def _garbage_lines(garbage: Garbage, top: int) -> Iterator[str]:
    freed = sum(block.size for block in garbage.blocks)
    if not freed:
        yield "Python's collector freed no GPU memory: no reference cycle kept any."
        return
    yield f"Python's collector freed {size_text(freed)} that reference cycles had kept, allocated by"
    sums: dict[str, tuple[int, int]] = {}
    for block in garbage.blocks:
        size, count = sums.get(frame_text(block.frame), (0, 0))
        sums[frame_text(block.frame)] = size + block.size, count + 1
    for line, (size, count) in sorted(sums.items(), key=lambda item: -item[1][0])[:top]:
        yield f"{size_text(size):>12}  {count:>7,}  {line}"
    for cycle in garbage.cycles[:top]:
        kinds = "cycle" if cycle.cycles == 1 else "cycles"
        yield (
            f"{size_text(cycle.size)} of tensors in {cycle.cycles:,} {kinds} of {cycle.members:,} objects,"
            " made by"
        )
        for kind, frame in cycle.objects:
            yield f"{'':>12}  {printable(kind)}: {frame_text(frame)}"


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
    live, reserved = size_text(device.allocated), size_text(device.reserved)
    return (
        f"device {device.number}: {live} live of {reserved} reserved;"
        f" the largest free block has {size_text(device.largest_free)}"
    )


def recording_text(snapshot: AllocationSnapshot) -> str:
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
