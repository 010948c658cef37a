"""Ask the exporter for the device on which an allocation failed: who else holds its memory."""

from __future__ import annotations

import time

from vramledger.agent import transport
from vramledger.agent_protocol.messages import make_request

TIMEOUT_SECONDS = 0.05
"""For the exporter's response: the program waits for it."""

SILENCE_SECONDS = 30.0
"""An exporter that did not answer is not asked for this time: a program that catches many failures would
wait for each."""

_silent_until = 0.0

SIMILAR_FREE_BYTES = 64 * 2**20
"""If the free bytes of two devices differ by less than this, they do not show which device is meant."""


def request_device(socket_path: str, free: int) -> dict[str, object] | None:
    """Return the exporter's entry for the device that failed, None when it is not available.

    We know the device by torch's number and the exporter knows it by its UUID, and we must not call CUDA. But
    the exporter knows our process, so the device is the one that we hold. If we hold several, it is the one
    whose free bytes are what torch was just told.
    """
    global _silent_until  # noqa: PLW0603 a process has one exporter
    if time.monotonic() < _silent_until:
        return None
    response = transport.request(socket_path, make_request("devices"), TIMEOUT_SECONDS)
    if response is None:
        _silent_until = time.monotonic() + SILENCE_SECONDS
    devices = response.get("devices") if response is not None else None
    if not isinstance(devices, list):
        return None
    ours = [device for device in devices if isinstance(device, dict) and _is_held_by_us(device)]
    if len(ours) == 1:
        return ours[0]
    known = [device for device in ours if isinstance(device.get("free"), int)]
    nearest = sorted(known, key=lambda device: abs(device["free"] - free))
    if not nearest or (len(nearest) > 1 and _have_similar_free(nearest[0], nearest[1])):
        return None
    return nearest[0]


def bytes_of_others(device: dict[str, object] | None) -> int | None:
    """Return the bytes that other processes hold on a device, None if the exporter did not say."""
    holders = device.get("holders") if device is not None else None
    if not isinstance(holders, list):
        return None
    total = 0
    for holder in holders:
        if not isinstance(holder, dict) or not isinstance(holder.get("bytes"), int):
            return None
        if not _is_us(holder):
            total += holder["bytes"]
    return total


def bytes_of_us(device: dict[str, object] | None) -> int | None:
    """Return the bytes that this process holds on a device, None if the exporter did not say."""
    holders = device.get("holders") if device is not None else None
    if not isinstance(holders, list):
        return None
    ours = [holder.get("bytes") for holder in holders if isinstance(holder, dict) and _is_us(holder)]
    return ours[0] if ours and isinstance(ours[0], int) else None


def _is_held_by_us(device: dict[str, object]) -> bool:
    holders = device.get("holders")
    return isinstance(holders, list) and any(isinstance(each, dict) and _is_us(each) for each in holders)


def _have_similar_free(one: dict[str, object], other: dict[str, object]) -> bool:
    return abs(int(one["free"]) - int(other["free"])) < SIMILAR_FREE_BYTES  # type: ignore[call-overload, no-any-return]


def _is_us(holder: dict[str, object]) -> bool:
    """Return whether a holder is this process; only the exporter knows, as our pid differs in a container."""
    return holder.get("self") is True
