"""Detect a device that is busy for minutes and neither computes nor moves anything.

A collective that waits for a lost rank spins in a kernel. By every utilisation metric that is 100 %, for as
long as it hangs. GPM's counters tell it from work (H100, driver 580): memory, NVLink, tensor and
floating-point units are at 0, and the integer units at 0.2 %. A kernel of one thread that spins looks the
same, with 0.04 %. So do a rank that waits for a checkpoint or for its data, and a server that polls in a
kernel. So this is evidence, and not a state: whether it is a fault, only the job says.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from vramledger.accounting.sample import Sample
from vramledger.model.reading import DeviceReading

WAITS_AFTER = 120.0
"""Seconds after which it is said. A healthy collective waits for its slowest rank for less than a step."""

BUSY = 0.95
"""The share of the time in which a kernel must run: one that waits runs all the time."""

PIPES = ("tensor", "fp64", "fp32", "fp16", "dram")
"""What a kernel that waits does not use."""

PIPE_SHARE = 1e-4
"""The share below which such a unit counts as unused: the memory of an idle H200 is at 4e-6."""

INTEGER_SHARE = 0.01
"""The same for the integer units, with which a kernel that waits asks whether it may go on: 0.0016 in a
collective. A kernel that only computes with integers, as in cryptography, is far above."""

LINKS = ("pcie_transmit", "pcie_receive", "nvlink_transmit", "nvlink_receive")

LINK_RATE = 4.0 * 2**20
"""Bytes a second below which a link counts as unused: reading the driver moves up to 1 MiB/s."""

NEEDED = frozenset({"tensor", "fp32", "dram", "integer"})
"""Without one of these figures nothing is said."""


class _Span(NamedTuple):
    """Since when a device has been busy without work, by both clocks, and the newest sample that says so."""

    begun: float
    begun_at: float
    updated: float


class BusyWithoutWorkWatch:
    """Remember for each device since when it has been busy without work."""

    def __init__(self) -> None:
        """Start without devices."""
        self._spans: dict[str, _Span] = {}

    def update(self, device: DeviceReading, sample: Sample) -> float | None:
        """Record a sample of a device; return the Unix time since which it has been busy without work.

        None until that has lasted for :data:`WAITS_AFTER` seconds, and where it cannot be known. One sample
        without counters changes nothing, because the next one covers its time too.
        """
        now = sample.monotonic
        span = self._spans.get(device.uuid)
        if span is not None and (sample.after_gap or now - span.updated > sample.longest_gap):
            span = None
        if device.activity is not None and _waits(device, device.activity):
            span = _Span(now, sample.time, now) if span is None else span._replace(updated=now)
        elif device.activity is not None or device.error is not None:
            span = None
        if span is None:
            self._spans.pop(device.uuid, None)
            return None
        self._spans[device.uuid] = span
        return span.begun_at if now - span.begun >= WAITS_AFTER else None

    def shift_times(self, seconds: float) -> None:
        """Move the Unix times along with a clock that was set."""
        self._spans = {
            uuid: span._replace(begun_at=span.begun_at + seconds) for uuid, span in self._spans.items()
        }

    def keep_only(self, uuids: Collection[str]) -> None:
        """Forget all devices except those with these UUIDs."""
        self._spans = {uuid: span for uuid, span in self._spans.items() if uuid in uuids}


def _waits(device: DeviceReading, activity: Mapping[str, float]) -> bool:
    if not activity.keys() >= NEEDED:
        return False
    busy = (device.utilization or {}).get("gpu", activity.get("graphics", 0.0))
    return (
        busy >= BUSY
        and activity["integer"] <= INTEGER_SHARE
        and activity.get("video", 0.0) == 0
        and all(activity.get(pipe, 0.0) <= PIPE_SHARE for pipe in PIPES)
        and all(activity.get(link, 0.0) <= LINK_RATE for link in LINKS)
    )
