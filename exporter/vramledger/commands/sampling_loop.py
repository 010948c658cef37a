"""Run the sampling loops of ``check`` and ``end``: sample until the result is sure, print it, and act.

They have no history, so they sample fast and only as long as necessary.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from vramledger.accounting.devices import hidden_on
from vramledger.accounting.owner_usage import Key
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands.cleanliness import (
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
from vramledger.commands.termination import EndTarget, Selection, Termination, end_targets, select_targets
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.model.reading import DeviceReading, HiddenHolder, Reading
from vramledger.model.snapshot import Snapshot, State
from vramledger.printable import printable
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.views.table import gib

SAMPLES_MIN = 2
"""The number of consecutive samples that must agree: the first sample of a process precedes its facts."""

FREED_WITHIN = 10.0
"""Seconds for which ``end`` watches for memory to be freed; 20 GiB took 94 ms on an H200."""

ORPHANS_WATCHED = 5.0
"""Seconds for which ``end`` watches before it ends orphans, so that it does not end those that still work. An
H200's driver has a row of utilisation for a busy process each second."""

SAMPLE_INTERVAL = 0.25
"""Seconds from one sample to the next: the result needs several, and somebody waits for it."""


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """The options of ``check``: ``wait`` is how long a device may take to become clean, seconds."""

    gpus: frozenset[str]
    tolerance: CheckTolerance
    wait: float
    as_json: bool


@dataclass(frozen=True, slots=True)
class EndOptions:
    """The options of ``end``: ``grace`` is the time from SIGTERM to SIGKILL, seconds.

    Without ``yes`` the holders are only listed.
    """

    selection: Selection
    grace: float
    idle_after: float
    yes: bool


async def _readings(supervisor: Supervisor) -> AsyncIterator[Reading]:
    async with aclosing(supervisor.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is not None:
                yield reading


def _listed_pids(reading: Reading) -> set[int]:
    return {entry.pid for device in reading.devices for entry in device.processes or ()}


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
    config = _fast_sampling(config)
    supervisor = Supervisor(config)
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=config.interval)
    results: list[CheckResult] = []
    count = clean = 0
    deadline = time.monotonic() + options.wait
    async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
        async for reading in readings:
            snapshot = tracker.update(reading)
            results = check_devices(snapshot, options.gpus, options.tolerance)
            count += 1
            clean = clean + 1 if overall_status(results) == CLEAN else 0
            over = time.monotonic() >= deadline
            # A driver that is slow once may answer the next time; one that is not there does not come.
            slow = snapshot.failure is not None and snapshot.failure[0] == "timeout"
            late = (not snapshot.up and (over or not slow)) or (count >= SAMPLES_MIN and over)
            if clean >= SAMPLES_MIN or (late and any(each.status == CLEAN for each in results)):
                own = {os.getpid(), supervisor.pid or 0}
                results = await asyncio.to_thread(
                    _recheck_with_hidden, config, options, own, reading, snapshot
                )
                # A process that the search cannot read will not be readable a moment later either.
                late = late or overall_status(results) != NOT_CLEAN
            if late:
                break
    if options.as_json:
        print(json.dumps(results_json(results)))
    else:
        for result in results:
            print(result.line)
    return overall_status(results)


def _recheck_with_hidden(
    config: SamplingConfig, options: CheckOptions, own: set[int], reading: Reading, snapshot: Snapshot
) -> list[CheckResult]:
    """Check once more, after a search for hidden holders."""
    found = find_hidden_holders(Host(config.procfs, config.rootfs), own, _listed_pids(reading))
    holders, unreadable = found or (None, 0)
    devices = tuple(replace(each, hidden=_hidden_on(each.reading, holders)) for each in snapshot.devices)
    return check_devices(
        replace(snapshot, devices=devices),
        options.gpus,
        options.tolerance,
        search=SearchExtent(found is not None, unreadable),
    )


def _hidden_on(
    device: DeviceReading, holders: tuple[HiddenHolder, ...] | None
) -> tuple[HiddenHolder, ...] | None:
    """Return who has the device's file open; that of a MIG instance is its GPU's."""
    return hidden_on(replace(device, parent=None), holders)


async def run_end(config: SamplingConfig, options: EndOptions) -> int:
    """List the selected holders, end them if ``yes`` is given, and return the exit status."""
    config = _fast_sampling(config)
    supervisor = Supervisor(config)
    async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
        reading, snapshot = await _watch_holders(readings, config, options)
        if refusals := list(_selection_refusals(snapshot, options.selection)):
            print("\n".join(refusals))
            return CANNOT_TELL
        own = {supervisor.pid or 0, *_own_pids()}
        targets = select_targets(snapshot, options.selection, own)
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
            host = Host(config.procfs, config.rootfs)
            complete = await _end_and_watch(chosen, options.grace, host, reading, readings) and complete
    if not complete:
        return 1
    return CANNOT_TELL if unseen else 0


async def _watch_holders(
    readings: AsyncIterator[Reading], config: SamplingConfig, options: EndOptions
) -> tuple[Reading, Snapshot]:
    """Sample until the states of the holders are known, or until the selection cannot be made."""
    tracker = HoldingTracker(idle_after=options.idle_after, interval=config.interval)
    # Only watching can show whether somebody works.
    watch = ORPHANS_WATCHED if options.selection.spares_working_orphans else 0.0
    if State.IDLE in options.selection.states:
        watch = options.idle_after
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
