"""Find out what a device did between two samples, for whom, and since when it has done nothing.

Measured on H200 and H100 (driver 580). GPM's SM counter is exactly 0 if no kernel ran. About twice a second
the driver notes the process that ran last, in a row of its utilisation, again and again while nobody else
runs. So a row of another process than before is work. The same process again says nothing at 0 %, and above 0
only where something ran: the driver gives the mean of some seconds. Beside a busy process, small work of
another one has no row at all.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from vramledger.accounting.sample import Clock, Sample, WorkEvidence
from vramledger.accounting.work.thread_times import FULLY_BUSY
from vramledger.model.device_signs import read_counters
from vramledger.model.reading import DeviceReading, ProcessUtilization

ROW_DELAY = 3.0
"""Seconds within which the driver names the process that ran: it notes one twice a second."""

LONGEST_BURST = 10.0
"""Seconds for which another holder may keep the device busy: small work beside it is not seen."""

BUSY_SHARE = 0.5
"""The share of the idle threshold in which others may work: unrelated work falls outside sooner or later."""

_CODERS = ("device_encoder_utilization_ratio", "device_decoder_utilization_ratio")


class DeviceWork(msgspec.Struct, omit_defaults=True):
    """What is remembered of one device."""

    updated: Clock  # the newest sample in which it answered
    runner: int | None = None  # the process that ran last, by the driver's newest row
    ran: bool = False  # whether something ran in the sample before, so that a row of it may come now
    named_at: float | None = None  # monotonic time of the newest row that names work, None before the first
    unnamed_at: float | None = None  # monotonic time of the first work that no row has named yet
    nothing_since: Clock | None = None  # since when the counters have proven that the device did nothing
    nothing_seconds: float = 0.0  # for how long they have proven it altogether
    # since when all work was that of processes which the driver named, in short bursts; with
    # ``nothing_seconds`` of that moment
    attributed_since: tuple[Clock, float] | None = None
    busy: list[tuple[float, float]] = []  # the spans of work within the idle threshold
    moved: bool = False  # whether any of its counters has ever moved
    rated: bool = False  # whether it has a rate: one that is not read now does not show that it is free
    # since when every sample had rows, and all work was somebody's whom they named
    named_since: Clock | None = None
    free_at: float | None = None  # monotonic time of the newest sample in which it was not fully busy


class DeviceWorkTracker:
    def __init__(self, idle_after: float, state: dict[str, DeviceWork]) -> None:
        self._idle_after = idle_after
        self.state = state

    def update(
        self, device: DeviceReading, clients: frozenset[int], sample: Sample, *, shared: bool
    ) -> WorkEvidence:
        """Record a sample of a device.

        ``clients``: the pids of the clients of MPS: the driver names a server in place of them. ``shared``:
        whether it shares its counters with other compute instances.
        """
        known, now = self._known(device.uuid, sample), sample.monotonic
        counted = read_counters(device.activity)
        known.moved = known.moved or counted is not None
        rate = _highest_rate(device)
        if counted is None and device.parent is not None and (device.activity or {}).get("sm") == 0:
            # An instance's counters lack its links, so all may be 0: nothing is proven, but those that have
            # moved before are a sign of quiet.
            rate = 0.0 if known.moved else None
        known.rated |= rate is not None or counted is not None or "utilization" in device.failed
        busy = bool(rate) or (counted is not None and (counted.kernels or counted.other))
        alone = not shared and len(device.processes or ()) == 1
        kernels = counted.kernels if counted is not None else bool(rate)
        ran = busy or counted is None
        named = _named(known, device.process_utilization or (), kernels=kernels, ran=ran or known.ran)
        known.ran = ran
        if busy and alone:
            named |= {entry.pid for entry in device.processes or ()}
        worked = busy or bool(named)
        late = _wait_for_name(known, now, named=bool(named), busy=busy)
        self._record_span(known, sample, worked=worked, counted=counted is not None, late=late)
        at_rest = not worked and (counted is not None or rate == 0)
        _record_signs(known, device, sample, late=late, at_rest=at_rest)
        return WorkEvidence(
            workers=frozenset(named),
            nothing_since=known.nothing_since,
            nothing_seconds=known.nothing_seconds,
            attributed_since=known.attributed_since,
            unknown=late or (device.process_utilization is None and not at_rest),
            clients_unknown=late or not at_rest,
            clients=clients,
            # Rows and rates are means of some seconds: they go on for a sample or two after the work.
            busy=bool(rate) if counted is None else counted.kernels or counted.other,
            named_since=known.named_since,
            free_at=known.free_at,
            rated=known.rated,
        )

    def _known(self, uuid: str, sample: Sample) -> DeviceWork:
        """Return what is remembered of a device; after a gap only what is true for longer."""
        before = self.state.get(uuid)
        if before is not None and sample.monotonic - before.updated[0] <= sample.longest_gap:
            return before
        runner = None if before is None else before.runner
        moved = before is not None and before.moved
        rated = before is not None and before.rated
        known = self.state[uuid] = DeviceWork(sample.clock, runner, moved=moved, rated=rated)
        return known

    def _record_span(
        self, known: DeviceWork, sample: Sample, *, worked: bool, counted: bool, late: bool
    ) -> None:
        before, known.updated = known.updated, sample.clock
        now = sample.monotonic
        if not counted:
            known.nothing_since = known.attributed_since = None
            return
        if worked:
            known.nothing_since = None
            if known.busy and known.busy[-1][1] >= before[0]:
                known.busy[-1] = (known.busy[-1][0], now)
            else:
                known.busy.append((before[0], now))
        else:
            known.nothing_since = known.nothing_since or before
            known.nothing_seconds += now - before[0]
        begin = now - self._idle_after
        while known.busy and known.busy[0][1] <= begin:
            del known.busy[0]
        longest = max((end - start for start, end in known.busy), default=0.0)
        share = sum(end - max(start, begin) for start, end in known.busy) / self._idle_after
        if late or longest > LONGEST_BURST or share > BUSY_SHARE:
            known.attributed_since = (sample.clock, known.nothing_seconds)
        elif known.attributed_since is None:
            known.attributed_since = (before, known.nothing_seconds - (0.0 if worked else now - before[0]))


def _record_signs(
    known: DeviceWork, device: DeviceReading, sample: Sample, *, late: bool, at_rest: bool
) -> None:
    if device.process_utilization is None or late:
        known.named_since = None
    elif known.named_since is None:
        known.named_since = sample.clock
    busiest = (device.utilization or {}).get("gpu")
    if at_rest or (busiest is not None and busiest < FULLY_BUSY):
        known.free_at = sample.monotonic


def _highest_rate(device: DeviceReading) -> float | None:
    rates = [] if device.utilization is None else list(device.utilization.values())
    coders = [value for name in _CODERS if isinstance(value := device.hardware.get(name), float)]
    return max(rates + coders) if rates else None


def _named(known: DeviceWork, rows: Collection[ProcessUtilization], *, kernels: bool, ran: bool) -> set[int]:
    """Return the processes that the driver's new rows name as those that worked.

    ``kernels``: whether kernels ran: then a row of 0 % of the process that ran before names it too, if nobody
    else is named. ``ran``: whether anything may have run: otherwise a row above 0 is of what ran before.
    """
    named: set[int] = set()
    for row in sorted(rows, key=lambda each: each.time):
        above_zero = max(row.sm, row.memory, row.encoder, row.decoder) > 0
        if (above_zero and ran) or known.runner not in (None, row.pid):
            named.add(row.pid)
        known.runner = row.pid
    return named or ({row.pid for row in rows} if kernels else set())


def _wait_for_name(known: DeviceWork, now: float, *, named: bool, busy: bool) -> bool:
    """Tell whether the device worked and no row has said for whom, as long as one may take."""
    if named:
        known.named_at = now
    if known.named_at is not None and now - known.named_at < ROW_DELAY:
        known.unnamed_at = None
        return False
    if busy and known.unnamed_at is None:
        known.unnamed_at = now
    late = known.unnamed_at is not None and now - known.unnamed_at >= ROW_DELAY
    if late and not busy:
        known.unnamed_at = None
    return late
