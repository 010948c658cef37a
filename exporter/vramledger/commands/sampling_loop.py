"""What ``check`` and ``end`` do: take samples until they are sure, say it, and act.

They have no history to look back on, so they sample fast and only as long as the question needs.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace

from vramledger.accounting.owner_usage import Key
from vramledger.accounting.tracker import HoldingTracker, hidden_on
from vramledger.commands.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    CheckResult,
    Tolerance,
    check_devices,
    document,
    overall,
)
from vramledger.commands.termination import Ending, Selection, Target, choose, end
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot, State
from vramledger.printable import printable
from vramledger.readers.hosts.hidden_holders import find_hidden_holders
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.views.table import gib

ALIKE = 2
"""Samples in a row that must agree: the first of a process comes before its facts."""

BACK = 10.0
"""Seconds that ``end`` watches for memory to come back; 20 GiB took 94 ms on an H200."""

PACE = 0.25
"""Seconds from one sample to the next: the answer needs several, and somebody waits for it."""


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What ``check`` was asked: ``wait`` is how long a device may take to become clean, seconds."""

    gpus: frozenset[str]
    tolerance: Tolerance
    wait: float
    as_json: bool


@dataclass(frozen=True, slots=True)
class EndOrder:
    """What ``end`` was asked: ``grace`` is from SIGTERM to SIGKILL, seconds; without ``yes`` only a list."""

    selection: Selection
    grace: float
    idle_after: float
    yes: bool


async def _readings(supervisor: Supervisor) -> AsyncIterator[Reading]:
    async with aclosing(supervisor.readings()) as readings:  # type: ignore[type-var]
        async for reading in readings:
            if reading is not None:
                yield reading


def _listed(reading: Reading) -> set[int]:
    return {entry.pid for device in reading.devices for entry in device.processes or ()}


def _fast(config: SamplingConfig) -> SamplingConfig:
    return replace(
        config,
        interval=min(config.interval, PACE),
        collectors=frozenset({"ledger", "process", "reservations"}),
    )


async def check(config: SamplingConfig, order: CheckOrder) -> int:
    """Print a verdict a device and return the exit status.

    A device that is not clean is looked at again until ``wait`` is over: what was ended a moment ago
    takes a moment to give its memory back.
    """
    config = _fast(config)
    supervisor = Supervisor(config)
    history = HoldingTracker(idle_after=IDLE_AFTER, interval=config.interval)
    verdicts: list[CheckResult] = []
    count = clean = 0
    deadline = time.monotonic() + order.wait
    async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
        async for reading in readings:
            snapshot = history.advance(reading)
            verdicts = check_devices(snapshot, order.gpus, order.tolerance)
            count += 1
            clean = clean + 1 if overall(verdicts) == CLEAN else 0
            late = not snapshot.up or (count >= ALIKE and time.monotonic() >= deadline)
            if clean >= ALIKE or (clean and late):
                own = {os.getpid(), supervisor.pid or 0}
                verdicts = await asyncio.to_thread(_with_hidden, config, order, own, reading, snapshot)
                late = late or overall(verdicts) == CLEAN
            if late:
                break
    if order.as_json:
        print(json.dumps(document(verdicts)))
    else:
        for verdict in verdicts:
            print(verdict.line)
    return overall(verdicts) if verdicts else CANNOT_TELL


def _with_hidden(
    config: SamplingConfig, order: CheckOrder, own: set[int], reading: Reading, snapshot: Snapshot
) -> list[CheckResult]:
    """Judge once more, after a complete search for hidden holders."""
    found = find_hidden_holders(Host(config.procfs, config.rootfs), own, _listed(reading))
    holders, unreadable = found or (None, 0)
    devices = tuple(replace(each, hidden=hidden_on(each.reading, holders)) for each in snapshot.devices)
    return check_devices(
        replace(snapshot, devices=devices), order.gpus, order.tolerance, unreadable=unreadable
    )


async def end_holders(config: SamplingConfig, order: EndOrder) -> int:
    """List the selected holders, end them when told to, and return the exit status."""
    config = _fast(config)
    host = Host(config.procfs, config.rootfs)
    supervisor = Supervisor(config)
    history = HoldingTracker(idle_after=order.idle_after, interval=config.interval)
    # Idleness is seen by watching, and by nothing else.
    watch = order.idle_after if State.IDLE in order.selection.states else 0.0
    begun: float | None = None
    count = 0
    async with aclosing(_readings(supervisor)) as readings:  # type: ignore[type-var]
        async for reading in readings:
            snapshot = history.advance(reading)
            if snapshot.host_pid_namespace is not True or not snapshot.up:
                reason, message = snapshot.failure or ("blind", "not in the host's PID namespace")
                print(f"cannot tell who holds memory ({reason}): {message}")
                return CANNOT_TELL
            begun = reading.monotonic if begun is None else begun
            count += 1
            if count >= ALIKE and reading.monotonic - begun >= watch:
                break
        own = {supervisor.pid or 0, *_ancestors()}
        targets = choose(snapshot, order.selection, own)
        missing = order.selection.pids - {target.pid for target in targets}
        for target in targets:
            print(target.line)
        for pid in sorted(missing):
            print(f"pid {pid} is not selected: it holds no GPU memory, or does not fit the other selectors")
        chosen = [target for target in targets if target.refusal is None]
        if not targets:
            print("nobody is selected, there is nothing to end")
        complete = len(chosen) == len(targets) and not missing
        if chosen and not order.yes:
            print("nothing was ended: this was a dry run; add --yes to do it")
        elif chosen:
            complete = await _end(chosen, order.grace, host, reading, readings) and complete
    return 0 if complete else 1


class _Return:
    """What comes back while holders are ended: seconds by (pid, device), and used memory by device."""

    def __init__(self, chosen: Collection[Target]) -> None:
        self._chosen = chosen
        self._began = time.monotonic()
        self.back: dict[tuple[int, Key], float] = {}
        self.first: dict[Key, int] = {}
        self.last: dict[Key, int] = {}

    def note(self, reading: Reading) -> None:
        """Take in a sample; a device that did not answer says nothing."""
        for device in reading.devices:
            key = (str(device.index), device.uuid)
            held = [target.pid for target in self._chosen if key in target.memory]
            if not held or device.processes is None or device.memory is None or device.error is not None:
                continue
            listed = {entry.pid for entry in device.processes}
            for pid in held:
                if pid not in listed:
                    self.back.setdefault((pid, key), reading.monotonic - self._began)
            self.first.setdefault(key, device.memory.used)
            self.last[key] = device.memory.used

    def complete(self, endings: Iterable[Ending]) -> bool:
        """Tell whether all memory of those who have ended is back."""
        return all(
            (each.target.pid, key) in self.back
            for each in endings
            if each.ended
            for key in each.target.memory
        )

    def outcome(self, ending: Ending) -> str:
        """Say in a line what came of one holder and of its memory."""
        target = ending.target
        parts = [f"pid {target.pid} {target.about}: {ending.outcome}"]
        for key, memory in sorted(target.memory.items()) if ending.ended else ():
            after = self.back.get((target.pid, key))
            fate = f"has not come back after {BACK:.0f} s" if after is None else f"back after {after:.1f} s"
            parts.append(f"{gib(memory)} on GPU {key[0]} {fate}")
        return printable("; ".join(parts))


async def _end(
    chosen: Collection[Target], grace: float, host: Host, before: Reading, readings: AsyncIterator[Reading]
) -> bool:
    """End these, and say what came back since ``before``; tell whether all of it did."""

    def start_of(pid: int) -> int | None:
        row = host.row(pid)
        return None if row is None else row.start

    returned = _Return(chosen)
    returned.note(before)
    ending = asyncio.create_task(asyncio.to_thread(end, chosen, start_of, grace))
    deadline: float | None = None
    async for reading in readings:
        returned.note(reading)
        if ending.done():
            deadline = deadline or time.monotonic() + BACK
            if returned.complete(ending.result()) or time.monotonic() > deadline:
                break
    endings = await ending
    for each in endings:
        print(returned.outcome(each))
    for key, used in sorted(returned.first.items()):
        print(f"GPU {key[0]} {key[1]}: used {gib(used)} before, {gib(returned.last[key])} now")
    return all(each.ended for each in endings) and returned.complete(endings)


def _ancestors() -> Iterator[int]:
    """Yield this program and everybody above it: a shell or a scheduler's epilog must not end itself."""
    import psutil  # noqa: PLC0415 10 ms that only who ends something pays

    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):  # one that ends meanwhile has nobody above it any more
        while process is not None:
            yield process.pid
            process = process.parent()
