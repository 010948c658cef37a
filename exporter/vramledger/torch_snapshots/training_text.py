"""Write as text what the agent adds to a snapshot: peaks within steps, types of numbers, garbage."""

from __future__ import annotations

from collections.abc import Iterator

from vramledger.agent_protocol.messages import CATEGORIES
from vramledger.agent_protocol.user_code import PHASES
from vramledger.printable import printable
from vramledger.torch_snapshots.text import frame_text, size_text
from vramledger.torch_snapshots.training import DeviceTraining, Garbage, Training, TrainingStep

SHOWN_STEPS = 8
"""The number of last steps that the text has."""


def training_text(training: Training, *, top: int = 20) -> str:
    """Write everything that is known."""
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
        yield "what these peaks were for is not known: 'vramledger snapshot PID --step' finds it out"
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
        yield f"device {device.device}: by type of number"
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
