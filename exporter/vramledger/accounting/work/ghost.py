"""Detect a ghost device: a device that reports to be busy for minutes, although no process uses it.

After some errors the driver reports a device as busy for ever, with the power of an idle one and without any
process, until it is reset. On Blackwell the counter may merely stick until the next program. The evidence is
that utilisation, power, the process lists and the search for hidden holders contradict each other. If one of
them is not known, it is not known whether the device is a ghost.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vramledger.accounting.sample import Clock, Sample
from vramledger.model.reading import DeviceReading, HiddenHolder

GHOST_AFTER = 180.0
"""Seconds of looking like a ghost: an ended holder is delisted first, a search takes up to a minute."""

BUSY = 0.5
"""The utilisation above which a device is busy."""

IDLE_POWER = 0.3
"""The share of the power limit up to which a device may be idle: 125 of 700 W on an H100."""


class GhostState(msgspec.Struct):
    """Since when each device, by UUID, has been busy without a process."""

    since: dict[str, Clock] = {}


class GhostWatch:
    """Watch for each device since when it has been busy without a process."""

    def __init__(self, state: GhostState) -> None:
        self.state = state

    def update(
        self, device: DeviceReading, hidden: tuple[HiddenHolder, ...] | None, sample: Sample
    ) -> tuple[bool | None, float | None]:
        """Record a sample; return whether it is a ghost, None if unknown, and the Unix time since which."""
        looks = _looks_like_ghost(device, hidden, sample)
        if not looks or sample.after_gap:
            self.state.since.pop(device.uuid, None)
        if not looks:
            return looks, None
        since = self.state.since.setdefault(device.uuid, sample.clock)
        if sample.monotonic - since[0] < GHOST_AFTER:
            return False, None
        return True, since[1]

    def keep_only(self, uuids: Collection[str]) -> None:
        """Forget all devices except those with these UUIDs."""
        self.state.since = {uuid: since for uuid, since in self.state.since.items() if uuid in uuids}


def _looks_like_ghost(
    device: DeviceReading, hidden: tuple[HiddenHolder, ...] | None, sample: Sample
) -> bool | None:
    busy = (device.utilization or {}).get("gpu")
    if device.processes or hidden:
        return False
    if busy is None or device.processes is None or hidden is None:
        return None
    if sample.reading.host_pid_namespace is not True:
        return None
    if busy < BUSY:
        return False
    power, limit = (device.hardware.get(name) for name in ("device_power_watts", "device_power_limit_watts"))
    if not isinstance(power, float) or not isinstance(limit, float) or limit <= 0:
        return None
    return power <= IDLE_POWER * limit
