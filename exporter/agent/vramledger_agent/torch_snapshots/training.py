"""Parse what the agent adds to a snapshot: peaks of steps, number types, garbage; nothing is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import PHASES
from vramledger_agent.torch_snapshots.safe_pickle import (
    flag,
    items,
    mapping,
    optional_number,
    text,
    whole_number,
)
from vramledger_agent.torch_snapshots.user_lines import Frame, user_frames

MAX_STEPS = 1000


class PhasePeak(NamedTuple):
    """The most live bytes in a part of a step, and what they were for."""

    size: int
    categories: Mapping[str, int]


class TrainingStep(NamedTuple):
    """One step on one device."""

    whole: bool  # all of it was recorded
    finished: bool  # it had ended when the snapshot was taken
    batch: int | None  # the size of its batch, None where not known
    peaks: Mapping[str, PhasePeak]  # by the part of the step
    # bytes of gradients that existed when the backward pass began, None without one
    gradients_before: int | None


class DeviceTraining(NamedTuple):
    """The steps on one device, the oldest first, and bytes by category and type of number."""

    device: int
    steps: tuple[TrainingStep, ...]
    types: Mapping[str, Mapping[str, int]]


class FreedBlock(NamedTuple):
    """A block that the collector freed; ``frame`` is the program's line, None where it was not recorded."""

    device: int
    size: int
    frame: Frame | None


class Cycle(NamedTuple):
    """Cycles that the same code made."""

    size: int  # bytes of their tensors
    cycles: int  # how many there were
    members: int  # the objects of the first one
    objects: tuple[tuple[str, Frame], ...]  # the type and the code of some of these


class Garbage(NamedTuple):
    """What Python's cyclic collector freed."""

    blocks: tuple[FreedBlock, ...]
    cycles: tuple[Cycle, ...]


class Training(NamedTuple):
    """What the agent has added."""

    from_start: bool  # the recording began before the first allocation
    devices: tuple[DeviceTraining, ...]  # those with live bytes
    # bytes of the results of the forward operations by type of number, empty where not known
    forward_types: Mapping[str, int]
    garbage: Garbage | None  # None where the collector was not asked


def parse_training(data: object) -> Training:
    """Read the agent's part of a snapshot. Raises SnapshotError if it is not what the agent writes."""
    whole = mapping(data, "vramledger")
    devices = mapping(whole.get("devices", {}), "devices")
    garbage = whole.get("garbage")
    return Training(
        flag(whole, "from_start"),
        tuple(_device(number, entry) for number, entry in devices.items()),
        _sizes(whole.get("forward_types", {}), "forward_types"),
        None if garbage is None else _garbage(mapping(garbage, "garbage")),
    )


def _device(number: object, data: object) -> DeviceTraining:
    entry = mapping(data, "devices")
    types = mapping(entry.get("types", {}), "types")
    return DeviceTraining(
        whole_number({"device": number}, "device"),
        tuple(_step(step) for step in items(entry, "steps", MAX_STEPS)),
        {text({"types": name}, "types"): _sizes(found, "types") for name, found in types.items()},
    )


def _step(entry: Mapping[object, object]) -> TrainingStep:
    phases = mapping(entry.get("phases", {}), "phases")
    return TrainingStep(
        flag(entry, "whole"),
        flag(entry, "finished"),
        optional_number(entry, "batch"),
        {name: _peak(mapping(phases[name], name)) for name in PHASES if name in phases},
        optional_number(entry, "gradients_before_backward"),
    )


def _peak(entry: Mapping[object, object]) -> PhasePeak:
    categories = mapping(entry.get("categories", {}), "categories")
    return PhasePeak(
        whole_number(entry, "bytes"),
        {name: whole_number(categories, name) for name in CATEGORIES if name in categories},
    )


def _sizes(data: object, place: str) -> dict[str, int]:
    found = mapping(data, place)
    return {text({place: name}, place): whole_number({place: size}, place) for name, size in found.items()}


def _garbage(entry: Mapping[object, object]) -> Garbage:
    return Garbage(
        tuple(
            FreedBlock(whole_number(block, "device"), whole_number(block, "size"), _line(block))
            for block in items(entry, "blocks")
        ),
        tuple(
            Cycle(
                whole_number(cycle, "bytes"),
                whole_number(cycle, "cycles"),
                whole_number(cycle, "count"),
                tuple(
                    (text(each, "type"), _frame(each, "file", "function")) for each in items(cycle, "objects")
                ),
            )
            for cycle in items(entry, "cycles")
        ),
    )


def _line(block: Mapping[object, object]) -> Frame | None:
    frames = tuple(_frame(frame, "filename", "name") for frame in items(block, "frames"))
    return next(iter(user_frames(frames)), None)


def _frame(entry: Mapping[object, object], file: str, function: str) -> Frame:
    return Frame(text(entry, file), whole_number(entry, "line"), text(entry, function))
