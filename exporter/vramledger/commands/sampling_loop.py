"""Run the loops of ``check`` and ``end``: look until the result is sure, print it, and act.

They ask the running exporter, which has watched since it started. Where none answers they sample themselves,
fast and only as long as necessary, and know nothing of what was before.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from vramledger.accounting.devices import hidden_on
from vramledger.accounting.owner_usage import Key
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands.exporter_ledger import follow_exporter
from vramledger.commands.termination import EndTarget, Selection, Termination, end_targets, select_targets
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.errors import StartupError
from vramledger.logs import fields, log
from vramledger.model.reading import DeviceReading, HiddenHolder, Reading
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot, State
from vramledger.printable import printable
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.open_device_files import DEVICE_PREFIX, open_files
from vramledger.sampling.supervisor import Supervisor
from vramledger.views.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    NO_SUCH_GPU,
    NOT_CLEAN,
    CheckResult,
    CheckTolerance,
    SearchExtent,
    amount,
    check_devices,
    device_matches,
    overall_status,
    results_json,
    unknown_devices,
    unseen_holders,
)
from vramledger.views.table import gib

SAMPLES_MIN = 2
"""The number of consecutive samples that must agree: the first sample of a process precedes its facts."""

FREED_WITHIN = 10.0
"""Seconds for which ``end`` watches for memory to be freed; 20 GiB took 94 ms on an H200."""

ORPHANS_WATCHED = 5.0
"""Seconds for which ``end`` watches before it judges orphans, so that it knows which of them work. An H200's
driver has a row of utilisation for a busy process each second."""

SAMPLE_INTERVAL = 0.25
"""Seconds from one sample to the next: the result needs several, and somebody waits for it."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of ``check``: ``wait`` is how long a device may take to become clean, seconds."""

    gpus: frozenset[str]
    tolerance: CheckTolerance
    wait: float
    as_json: bool
    control_socket: Path


@dataclass(frozen=True, slots=True)
class EndOptions:
    """The options of ``end``: ``grace`` is the time from SIGTERM to SIGKILL, seconds.

    Without ``yes`` the holders are only listed. ``idle_after`` is None where the user has not chosen it.
    """

    selection: Selection
    grace: float
    idle_after: float | None
    yes: bool
    control_socket: Path


async def _readings(supervisor: Supervisor) -> AsyncIterator[Reading]:
    async with aclosing(supervisor.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is not None:
                yield reading


async def _own_snapshots(
    readings: AsyncIterator[Reading], tracker: HoldingTracker
) -> AsyncIterator[Snapshot]:
    async for reading in readings:
        yield tracker.update(reading)


async def _exporter_snapshots(path: Path) -> AsyncIterator[Snapshot]:
    async with aclosing(follow_exporter(path)) as ledgers:  # type: ignore[type-var]
        async for ledger in ledgers:
            yield ledger.snapshot


def _log_own_look(error: StartupError) -> None:
    log.info(
        "Sampling without an exporter: what was before is not known, such as who was idle or orphaned",
        extra=fields(why=str(error)),
    )


def _listed_pids(devices: Iterable[DeviceReading]) -> set[int]:
    return {entry.pid for device in devices for entry in device.processes or ()}


def _fast_sampling(config: SamplingConfig) -> SamplingConfig:
    return replace(
        config,
        interval=min(config.interval, SAMPLE_INTERVAL),
        collectors=frozenset({"ledger", "process", "reservations"}),
    )


async def run_check(config: SamplingConfig, options: CheckOptions) -> int:
    """Print a result for each device and return the exit status.

    A device that is not clean is checked again until ``wait`` is over: a process that has just ended needs a
    moment to free its memory.
    """
    try:
        async with aclosing(_exporter_snapshots(options.control_socket)) as snapshots:  # type: ignore[type-var]
            results, since = await _check(snapshots, config, options, lambda: None)
    except StartupError as error:
        _log_own_look(error)
        config = _fast_sampling(config)
        supervisor = Supervisor(config)
        tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=config.interval)
        async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
            snapshots = _own_snapshots(readings, tracker)
            results, since = await _check(snapshots, config, options, lambda: supervisor.pid)
    if options.as_json:
        print(json.dumps(results_json(results, since)))
    else:
        for result in results:
            print(result.line)
    return overall_status(results)


async def _check(
    snapshots: AsyncIterator[Snapshot],
    config: SamplingConfig,
    options: CheckOptions,
    sampler_pid: Callable[[], int | None],
) -> tuple[list[CheckResult], float | None]:
    """Return the results, and since when the holders were watched (Unix time)."""
    results: list[CheckResult] = []
    since: float | None = None
    count = clean = 0
    deadline = time.monotonic() + options.wait
    async for snapshot in snapshots:
        results, since = check_devices(snapshot, options.gpus, options.tolerance), snapshot.watched_since
        count += 1
        clean = clean + 1 if overall_status(results) == CLEAN else 0
        over = time.monotonic() >= deadline
        # A driver that is slow once may answer the next time; one that is not there does not come.
        slow = snapshot.failure is not None and snapshot.failure[0] == "timeout"
        late = (not snapshot.up and (over or not slow)) or (count >= SAMPLES_MIN and over)
        if clean >= SAMPLES_MIN or (late and any(each.status == CLEAN for each in results)):
            own = {os.getpid(), sampler_pid() or 0}
            results = await asyncio.to_thread(_recheck_with_hidden, config, options, own, snapshot)
            # A process that the search cannot read will not be readable a moment later either.
            late = late or overall_status(results) != NOT_CLEAN
        if late:
            break
    return results, since


def _recheck_with_hidden(
    config: SamplingConfig, options: CheckOptions, own: set[int], snapshot: Snapshot
) -> list[CheckResult]:
    """Check once more, after a search for hidden holders."""
    listed = _listed_pids(device.reading for device in snapshot.devices)
    found = find_hidden_holders(Host(config.procfs, config.rootfs), own, listed)
    holders, unreadable = found or (None, 0)
    devices = tuple(_with_hidden(each, holders) for each in snapshot.devices)
    return check_devices(
        replace(snapshot, devices=devices),
        options.gpus,
        options.tolerance,
        search=SearchExtent(found is not None, unreadable),
    )


def _with_hidden(device: DeviceSnapshot, holders: tuple[HiddenHolder, ...] | None) -> DeviceSnapshot:
    """Return a device with its hidden holders: those found now, and others that the exporter has found.

    Not every user may look into every process, and the exporter may.
    """
    found = _hidden_on(device.reading, holders)
    if found is None:
        return replace(device, hidden=None)
    pids = {each.pid for each in found}
    return replace(device, hidden=(*found, *(each for each in device.hidden or () if each.pid not in pids)))


def _hidden_on(
    device: DeviceReading, holders: tuple[HiddenHolder, ...] | None
) -> tuple[HiddenHolder, ...] | None:
    """Return who has the device's file open; that of a MIG instance is its GPU's."""
    return hidden_on(replace(device, parent=None), holders)


async def run_end(config: SamplingConfig, options: EndOptions) -> int:
    """List the selected holders, end them if ``yes`` is given, and return the exit status."""
    config = _fast_sampling(config)
    host = Host(config.procfs, config.rootfs)
    supervisor = Supervisor(config)
    async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
        snapshot, reading, refusals = await _observe(readings, config, options)
        if refusals:
            print("\n".join(refusals))
            return CANNOT_TELL
        own = {supervisor.pid or 0, *_own_pids()}
        targets = [
            _confirm(target, reading, host) for target in select_targets(snapshot, options.selection, own)
        ]
        missing = options.selection.pids - {target.pid for target in targets}
        for target in targets:
            print(target.line)
        for pid in sorted(missing):
            print(f"pid {pid} is not selected: it holds no GPU memory, or does not fit the other selectors")
        unseen = list(_unseen_lines(snapshot, options.selection.gpus))
        for line in unseen:
            print(line)
        chosen = [target for target in targets if target.refusal is None]
        if not targets:
            print("no holder is selected, there is nothing to end")
        complete = len(chosen) == len(targets) and not missing
        if chosen and not options.yes:
            print("nothing was ended: this was a dry run; add --yes to do it")
        elif chosen:
            complete = await _end_and_watch(chosen, options.grace, host, reading, readings) and complete
    if not complete:
        return 1
    return CANNOT_TELL if unseen else 0


async def _observe(
    readings: AsyncIterator[Reading], config: SamplingConfig, options: EndOptions
) -> tuple[Snapshot, Reading, list[str]]:
    """Return what is known of the holders, a sample of our own, and why nothing can be selected."""
    try:
        snapshot = await _ask_exporter(options)
        reading = await readings.__anext__()
    except StartupError as error:
        _log_own_look(error)
        reading, snapshot = await _watch_holders(readings, config, options)
    refusals = list(_selection_refusals(snapshot, options.selection))
    if reading.failure is not None and not refusals:
        refusals = [f"cannot say who holds memory ({reading.failure[0]}): {reading.failure[1]}"]
    return snapshot, reading, refusals


async def _ask_exporter(options: EndOptions) -> Snapshot:
    """Return what the exporter knows of the holders, from a sample that began after the question.

    Raises:
        StartupError: no exporter answers, or none knows what was asked for.
    """
    count = 0
    async with aclosing(follow_exporter(options.control_socket)) as ledgers:  # type: ignore[type-var]
        async for snapshot, _, idle_after in ledgers:
            if options.idle_after is not None and options.idle_after < idle_after:
                message = f"--idle-after is shorter than the exporter's {idle_after:g} s"
                raise StartupError(message)
            count += 1
            watched = (snapshot.time or 0.0) - (snapshot.watched_since or 0.0)
            known = count >= SAMPLES_MIN and watched >= _watch_time(options, idle_after)
            if known or any(_selection_refusals(snapshot, options.selection)):
                break
    return _with_idle_threshold(snapshot, options.idle_after, idle_after)


def _watch_time(options: EndOptions, idle_after: float) -> float:
    """Return for how long holders must have been watched: only that can show whether somebody works."""
    spares_working = options.selection.spares_working_orphans
    if State.IDLE in options.selection.states or (spares_working and options.idle_after is not None):
        return idle_after
    return ORPHANS_WATCHED if spares_working else 0.0


def _with_idle_threshold(snapshot: Snapshot, idle_after: float | None, exporters: float) -> Snapshot:
    """Return a snapshot in which nobody counts as idle or not working for less than ``idle_after``.

    Args:
        snapshot: what the exporter says.
        idle_after: the threshold that the user gave, None if the exporter's is meant.
        exporters: the exporter's own threshold, which is not longer.
    """
    if idle_after is None:
        return snapshot

    def with_threshold(holding: Holding) -> Holding:
        if holding.state is State.ORPHANED and holding.working is False and idle_after > exporters:
            return replace(holding, working=None)  # known for the exporter's time only
        idle_for = (snapshot.time or 0.0) - holding.since
        if holding.state is not State.IDLE or idle_for >= idle_after:
            return holding
        return replace(holding, state=State.ACTIVE, why=f"no GPU work for only {idle_for:.0f} s")

    devices = tuple(
        replace(device, holdings=tuple(map(with_threshold, device.holdings))) for device in snapshot.devices
    )
    return replace(snapshot, devices=devices)


def _confirm(target: EndTarget, reading: Reading, host: Host) -> EndTarget:
    """Return a target, refused unless it certainly uses the driver at this moment.

    So nobody is ended only because the exporter says so: the driver lists it now, or it has the driver's
    files open.
    """
    if target.refusal is not None:
        return target
    row = host.row(target.pid)
    if row is None or row.start != target.start:
        return replace(target, refusal="it has ended since")
    if target.pid not in _listed_pids(reading.devices) and not open_files(target.pid, DEVICE_PREFIX):
        return replace(target, refusal="the driver does not list it any more, and it has no GPU open")
    return target


async def _watch_holders(
    readings: AsyncIterator[Reading], config: SamplingConfig, options: EndOptions
) -> tuple[Reading, Snapshot]:
    """Sample until the states of the holders are known, or until the selection cannot be made."""
    idle_after = options.idle_after or IDLE_AFTER
    tracker = HoldingTracker(idle_after=idle_after, interval=config.interval)
    watch = _watch_time(options, idle_after)
    begun: float | None = None
    count = 0
    async for reading in readings:
        snapshot = tracker.update(reading)
        begun = reading.monotonic if begun is None else begun
        count += 1
        known = count >= SAMPLES_MIN and reading.monotonic - begun >= watch
        if known or any(_selection_refusals(snapshot, options.selection)):
            break
    return reading, snapshot


def _selection_refusals(snapshot: Snapshot, selection: Selection) -> Iterator[str]:
    """Say why nothing can be selected here at all."""
    if snapshot.host_pid_namespace is not True or not snapshot.up:
        reason, message = snapshot.failure or ("blind", "not in the host's PID namespace")
        yield f"cannot say who holds memory ({reason}): {message}"
        return
    for name in unknown_devices(snapshot, selection.gpus):
        yield f"GPU {name}: {NO_SUCH_GPU}; nothing was ended"


def _unseen_lines(snapshot: Snapshot, gpus: Collection[str]) -> Iterator[str]:
    """Name the selected devices whose holders are not known: they may hold what was to be ended."""
    for device in snapshot.devices:
        if not gpus or device_matches(gpus, device):
            gpu, uuid = device.key
            for reason in unseen_holders(device):
                yield f"GPU {gpu} {uuid}: {reason.text}; its holders are not known"


class _FreedMemory:
    """Measure what is freed while holders are ended: seconds by (pid, device), and used memory by device."""

    def __init__(self, chosen: Collection[EndTarget]) -> None:
        self._chosen = chosen
        self._began = time.monotonic()
        self.freed_after: dict[tuple[int, Key], float] = {}
        self.used_before: dict[Key, int] = {}
        self.used_now: dict[Key, int] = {}

    def record(self, reading: Reading) -> None:
        """Record a sample; if a device did not answer, its used memory is not known."""
        self.used_now = {}
        for device in reading.devices:
            key = (str(device.index), device.uuid)
            held = [target.pid for target in self._chosen if key in target.memory]
            if not held or device.processes is None or device.memory is None or device.error is not None:
                continue
            listed = {entry.pid for entry in device.processes}
            for pid in held:
                if pid not in listed:
                    self.freed_after.setdefault((pid, key), reading.monotonic - self._began)
            self.used_before.setdefault(key, device.memory.used)
            self.used_now[key] = device.memory.used

    def complete(self, terminations: Iterable[Termination]) -> bool:
        """Tell whether all memory of the processes that have ended is freed."""
        return all(
            (each.target.pid, key) in self.freed_after
            for each in terminations
            if each.ended
            for key in each.target.memory
        )

    def describe_outcome(self, termination: Termination) -> str:
        """Say in a line what happened to one holder and to its memory."""
        target = termination.target
        parts = [f"pid {target.pid} {target.about}: {termination.outcome}"]
        for key, memory in sorted(target.memory.items()) if termination.ended else ():
            after = self.freed_after.get((target.pid, key))
            if after is not None:
                fate = f"freed after {after:.1f} s"
            elif key in self.used_now:
                fate = f"not freed after {FREED_WITHIN:.0f} s"
            else:
                fate = "freed or not: the GPU does not answer"
            parts.append(f"{amount(memory)} on GPU {key[0]} {fate}")
        return printable("; ".join(parts))

    def describe_devices(self) -> Iterator[str]:
        """Say for each device how much was used before and is used now."""
        for key, used in sorted(self.used_before.items()):
            now = gib(self.used_now[key]) if key in self.used_now else "unknown"
            yield f"GPU {key[0]} {key[1]}: used {gib(used)} before, {now} now"


async def _end_and_watch(
    chosen: Collection[EndTarget], grace: float, host: Host, before: Reading, readings: AsyncIterator[Reading]
) -> bool:
    """End these holders, and say what was freed since ``before``; tell whether all of it was."""

    def start_of(pid: int) -> int | None:
        row = host.row(pid)
        return None if row is None else row.start

    freed = _FreedMemory(chosen)
    freed.record(before)
    task = asyncio.create_task(asyncio.to_thread(end_targets, chosen, start_of, grace))
    deadline: float | None = None
    async for reading in readings:
        freed.record(reading)
        if task.done():
            deadline = deadline or time.monotonic() + FREED_WITHIN
            if freed.complete(task.result()) or time.monotonic() > deadline:
                break
    terminations = await task
    for each in terminations:
        print(freed.describe_outcome(each))
    for line in freed.describe_devices():
        print(line)
    return all(each.ended for each in terminations) and freed.complete(terminations)


def _own_pids() -> Iterator[int]:
    """Yield this program and every ancestor: a shell or a scheduler's epilog must not end itself."""
    import psutil  # noqa: PLC0415 10 ms that only who ends something pays

    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):  # a process that has just ended has no ancestors any more
        while process is not None:
            yield process.pid
            process = process.parent()
