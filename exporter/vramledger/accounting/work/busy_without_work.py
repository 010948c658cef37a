"""Detect a device that is busy for minutes and neither computes nor moves anything, and a ghost device.

A collective that waits for a lost rank spins in a kernel. By every utilisation metric that is 100 %, for as
long as it hangs. GPM's counters tell it from work (H100, driver 580): memory, NVLink, tensor and
floating-point units are at 0, and the integer units at 0.2 %. A kernel of one thread that spins looks the
same, with 0.04 %. So do a rank that waits for a checkpoint or for its data, and a server that polls in a
kernel. So this is evidence, and not a state: whether it is a fault, only the job says.

A hang lasts for hours, and meanwhile other programs come and go. Each of them moves something on a device on
which it does nothing: 2.4 MiB/s over PCIe and 0.26 % of the memory's bandwidth for a second when a program of
8 GiB was killed beside a hang, 6.3 MiB/s when a launcher initialised CUDA (two H100s, driver 580). So short
movements without any computation do not begin the time again.

Where several programs wait on one device, it runs them in turns and moves what they have in registers with
each turn: 0.21 % of the memory's bandwidth, 20 MiB/s to the host and 58 from it with the ranks of four jobs
on an H100. One alone moves nothing.

A ghost reports to be busy although no process uses it. After some errors the driver reports a device as busy
for ever, with the power of an idle one and without any process, until it is reset. On Blackwell the counter
may merely stick until the next program. The evidence is that utilisation, power, the process lists and the
search for hidden holders contradict each other. If one of them is not known, it is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vramledger.accounting.sample import Clock, Sample
from vramledger.model.reading import DeviceReading, HiddenHolder
from vramledger.model.snapshot import UnixTime

WAITS_AFTER = 120.0
"""Seconds after which it is said. A healthy collective waits for its slowest rank for less than a step."""

BUSY = 0.95
"""The share of the time in which a kernel must run: one that waits runs all the time."""

PIPES = ("tensor", "fp64", "fp32", "fp16")
"""What a kernel that waits does not use."""

PIPE_SHARE = 1e-4
"""The share below which such a unit, or the memory, counts as unused; an idle memory (H200) is at 4e-6."""

INTEGER_SHARE = 0.01
"""The same for the integer units, with which a kernel that waits asks whether it may go on: 0.0016 in a
collective."""

INTEGER_PER_SM = 0.08
"""The same for each SM that runs a kernel: a kernel on one SM of 132 uses at most 0.0076 of all. Measured on
an H100: a collective that waits 0.008, a thread that only reads a clock 0.05; but a thread that computes with
integers 0.11, a block of such threads 0.93."""

TURNS_INTEGER_PER_SM = 0.015
"""The same where several programs run in turns, of which one may compute: four that waited used 0.009."""

PCIE = ("pcie_transmit", "pcie_receive")
NVLINK = ("nvlink_transmit", "nvlink_receive")
"""What a collective moves goes over NVLink, where there is one."""

LINK_RATE = 4.0 * 2**20
"""Bytes a second below which a link counts as unused: reading the driver moves up to 1 MiB/s."""

TURNS_MEMORY_SHARE = 0.005
TURNS_LINK_RATE = 128.0 * 2**20
"""The same of memory and PCIe where several programs run in turns: about twice what was measured."""

LONGEST_MOVEMENT = 10.0
"""Seconds for which something may be moved without a break."""

MOVEMENT_SHARE = 0.05
"""The share of the time in which something may be moved altogether, beyond :data:`LONGEST_MOVEMENT`."""

LEAST_TURN = 0.05
"""The share of a device's time from which a process counts as one of those that it runs in turns."""

NEEDED = frozenset({*PIPES, *PCIE, "dram", "integer", "sm"})
"""Without one of these figures nothing is said."""


class Span(NamedTuple):
    """A time in which a device is busy without work."""

    begun: float  # its beginning, monotonic
    begun_at: UnixTime  # its beginning, Unix time
    updated: float  # the newest sample, monotonic
    waited: float  # the newest sample in which nothing was moved, monotonic
    moved: float = 0.0  # seconds in which something was moved

    def after_movement(self, now: float) -> Span | None:
        """Return the span after a sample in which something was moved; None if that was too much."""
        moved = self.moved + now - self.updated
        most = max(LONGEST_MOVEMENT, MOVEMENT_SHARE * (now - self.begun))
        if now - self.waited > LONGEST_MOVEMENT or moved > most:
            return None
        return self._replace(updated=now, moved=moved)


def busy_without_work(
    spans: dict[str, Span], device: DeviceReading, sample: Sample, *, in_turns: bool = False
) -> float | None:
    """Record a sample of a device; return the Unix time since which it has been busy without work.

    None until that has lasted for :data:`WAITS_AFTER` seconds, and where it cannot be known. One sample
    without counters changes nothing, because the next one covers its time too. ``in_turns``: several
    processes keep it busy.
    """
    now = sample.monotonic
    span = spans.get(device.uuid)
    if span is not None and (sample.after_gap or now - span.updated > sample.longest_gap):
        span = None
    if device.activity is not None and _computes_nothing(device, device.activity, in_turns=in_turns):
        if not _moves(device.activity, in_turns=in_turns):
            begun = Span(now, sample.time, now, now) if span is None else span
            span = begun._replace(updated=now, waited=now)
        elif span is not None:
            span = span.after_movement(now)
    elif device.activity is not None or device.error is not None:
        span = None
    if span is None:
        spans.pop(device.uuid, None)
        return None
    spans[device.uuid] = span
    return span.begun_at if now - span.begun >= WAITS_AFTER else None


def who_keeps_busy(shares: Mapping[int, float]) -> frozenset[int]:
    """Return who keeps a device busy: with at least half of an equal part of its time."""
    runners = sum(share >= LEAST_TURN for share in shares.values())
    least = 0.5 / max(1, runners)
    return frozenset(pid for pid, share in shares.items() if share >= least)


def _computes_nothing(device: DeviceReading, activity: Mapping[str, float], *, in_turns: bool) -> bool:
    """Tell whether a kernel runs all the time, and neither computes nor sends anything over NVLink."""
    if not activity.keys() >= NEEDED:
        return False
    busy = (device.utilization or {}).get("gpu", activity.get("graphics", 0.0))
    integer_per_sm = TURNS_INTEGER_PER_SM if in_turns else INTEGER_PER_SM
    return (
        busy >= BUSY
        and activity["integer"] <= min(INTEGER_SHARE, integer_per_sm * activity["sm"])
        and activity.get("video", 0.0) == 0
        and all(activity.get(pipe, 0.0) <= PIPE_SHARE for pipe in PIPES)
        and all(activity.get(link, 0.0) <= LINK_RATE for link in NVLINK)
    )


def _moves(activity: Mapping[str, float], *, in_turns: bool) -> bool:
    """Tell whether memory or PCIe moved more than reading the driver does, or than turns do."""
    share, rate = (TURNS_MEMORY_SHARE, TURNS_LINK_RATE) if in_turns else (PIPE_SHARE, LINK_RATE)
    return activity["dram"] > share or any(activity.get(link, 0.0) > rate for link in PCIE)


GHOST_AFTER = 180.0
"""Seconds of looking like a ghost: an ended holder is delisted first, a search takes up to a minute."""

GHOST_BUSY = 0.5
IDLE_POWER = 0.3
"""The share of the power limit up to which a device may be idle: 125 of 700 W on an H100."""


def ghost_since(
    known: dict[str, Clock], device: DeviceReading, hidden: tuple[HiddenHolder, ...] | None, sample: Sample
) -> tuple[bool | None, float | None]:
    """Record a sample; return whether it is a ghost, None if unknown, and the Unix time since which."""
    looks = _looks_like_ghost(device, hidden, sample)
    if not looks or sample.after_gap:
        known.pop(device.uuid, None)
    if not looks:
        return looks, None
    since = known.setdefault(device.uuid, sample.clock)
    if sample.monotonic - since[0] < GHOST_AFTER:
        return False, None
    return True, since[1]


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
    if busy < GHOST_BUSY:
        return False
    power, limit = (device.hardware.get(name) for name in ("device_power_watts", "device_power_limit_watts"))
    if not isinstance(power, float) or not isinstance(limit, float) or limit <= 0:
        return None
    return power <= IDLE_POWER * limit
