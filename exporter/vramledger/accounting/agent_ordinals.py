"""Translate a framework's device numbers to UUIDs, without asking CUDA.

A process numbers the devices that it sees from 0, in the order that CUDA_VISIBLE_DEVICES and
CUDA_DEVICE_ORDER give. In a container or a job it sees only the devices that were assigned to it. The driver
tells us how many bytes the process holds on each device. We translate a number only where both facts together
leave one possible device: a figure on the wrong device is worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vramledger.model.reading import DeviceReading

SLACK = 64 * 2**20
"""Bytes by which a report may exceed NVML's figure: the two are read up to a few seconds apart."""


def translate(
    wanted: Mapping[int, int],
    held: Mapping[str, int | None],
    visible: Mapping[str, str | None] | None,
    devices: Sequence[DeviceReading],
    *,
    apart: bool,
) -> dict[int, str]:
    """Return the UUIDs of those ordinals that are certain.

    ``apart``: the process may see fewer devices than we do, so its numbers may differ from ours.
    """
    wanted = {ordinal: least for ordinal, least in wanted.items() if least > 0}
    order = _enumerate(visible, devices, apart=apart)
    if order.known is not None and all(ordinal < len(order.known) for ordinal in wanted):
        found = {ordinal: order.known[ordinal] for ordinal in wanted}
        if all(_fits(wanted[ordinal], uuid, held) for ordinal, uuid in found.items()):
            return found
    # Otherwise its numbers differ from ours: a device cgroup that we cannot see, or the framework's own
    # choice.
    if order.rank is not None and (not order.rank or all(ordinal < len(order.rank) for ordinal in wanted)):
        ranks = {ordinal: order.rank[ordinal] if order.rank else ordinal for ordinal in wanted}
        inward = {device.uuid: held[device.uuid] for device in devices if device.uuid in held}
        return _monotone(sorted(wanted, key=ranks.__getitem__), wanted, inward)
    return _only(wanted, held)


class _Order(NamedTuple):
    """How a process numbers devices.

    ``known`` are the UUIDs in its order, None when they are not certain. ``rank`` are places in the order of
    PCI addresses, by ordinal: empty when they are the same as the ordinals, None when that is not certain
    either.
    """

    known: list[str] | None
    rank: list[int] | None


_UNKNOWN = _Order(None, None)


def _enumerate(
    visible: Mapping[str, str | None] | None, devices: Sequence[DeviceReading], *, apart: bool
) -> _Order:
    if visible is None:
        return _UNKNOWN
    whole = [device for device in devices if device.parent is None]
    # FASTEST_FIRST, the default, puts the fastest device first and does not define the order of the others.
    alike = len({device.name for device in whole}) <= 1 or visible.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    numbered = alike and not any(device.divided for device in whole)
    text = visible.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        if not numbered:
            return _UNKNOWN
        return _Order(None if apart else [device.uuid for device in whole], [])
    known, rank = _listed(text, devices, None if apart else whole)
    if not rank:
        return _Order(known, None)
    mixed = len(known) > (0 if apart else len(rank))
    twice = len(set(rank)) < len(rank)  # CUDA makes no device of an entry that is listed twice
    if mixed or twice or not numbered:
        return _UNKNOWN
    return _Order(None if apart else known, rank)


def _listed(
    text: str, devices: Sequence[DeviceReading], whole: Sequence[DeviceReading] | None
) -> tuple[list[str], list[int]]:
    """Return the UUIDs and the numbers in a list; the numbers as UUIDs too where ``whole`` is known."""
    known: list[str] = []
    rank: list[int] = []
    for token in (part.strip() for part in text.split(",")):
        if token.startswith(("GPU-", "MIG-")):
            uuid = _whole_uuid(token, devices)
            if uuid is None:
                break
            known.append(uuid)
        elif token.isascii() and token.isdigit() and (whole is None or int(token) < len(whole)):
            rank.append(int(token))
            if whole is not None:
                known.append(whole[rank[-1]].uuid)
        else:
            break  # -1, empty, or not a device: CUDA sees only the devices before it
    return known, rank


def _whole_uuid(token: str, devices: Sequence[DeviceReading]) -> str | None:
    """Return the one device whose UUID begins like this; CUDA accepts the beginning of a UUID."""
    found = [device.uuid for device in devices if device.uuid.startswith(token)]
    return found[0] if len(found) == 1 else None


def _fits(least: int, uuid: str, held: Mapping[str, int | None]) -> bool:
    if uuid not in held:
        return False
    bytes_ = held[uuid]
    return bytes_ is None or least <= bytes_ + SLACK


def _monotone(
    ordinals: Sequence[int], wanted: Mapping[int, int], held: Mapping[str, int | None]
) -> dict[int, str]:
    """Translate numbers whose order is known; one is certain if only one device is possible for it."""
    uuids = list(held)
    first = _leftmost(ordinals, uuids, wanted, held)
    last = _leftmost(ordinals[::-1], uuids[::-1], wanted, held)
    if first is None or last is None:
        return {}
    return {ordinal: uuid for ordinal, uuid in first.items() if last[ordinal] == uuid}


def _leftmost(
    ordinals: Sequence[int], uuids: Sequence[str], wanted: Mapping[int, int], held: Mapping[str, int | None]
) -> dict[int, str] | None:
    places: dict[int, str] = {}
    left = iter(uuids)
    for ordinal in ordinals:
        uuid = next((each for each in left if _fits(wanted[ordinal], each, held)), None)
        if uuid is None:
            return None
        places[ordinal] = uuid
    return places


def _only(wanted: Mapping[int, int], held: Mapping[str, int | None]) -> dict[int, str]:
    """Translate numbers whose order is not known: a number that fits only one device means that device."""
    places: dict[int, str] = {}
    left = dict(held)
    todo = dict(wanted)
    while True:
        found = {
            ordinal: fitting[0]
            for ordinal, least in todo.items()
            if len(fitting := [uuid for uuid in left if _fits(least, uuid, left)]) == 1
        }
        if not found or len(set(found.values())) < len(found):
            return places
        places.update(found)
        for ordinal, uuid in found.items():
            del left[uuid], todo[ordinal]
