"""Run ``vramledger end``: end holders by pid, state, owner or GPU, safely."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from contextlib import aclosing, suppress

from msgspec.structs import replace

from vramledger.accounting.owners.owner_usage import Key
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands import samples
from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.termination import EndTarget, Selection, Termination, end_targets, select_targets
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.errors import StartupError, UsageError
from vramledger.logs import fields, log
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Holding, Snapshot, State
from vramledger.readers.hosts.driver_watch import DEVICE_PREFIX, open_files
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.verdicts import cleanliness
from vramledger_agent.commands.parser import Commands, add_log, duration, pid
from vramledger_agent.printable import gib, printable, write_plain

FREED_WITHIN = 10.0
"""Seconds for which ``end`` watches for memory to be freed; 20 GiB took 94 ms on an H200."""

ORPHANS_WATCHED = 5.0
"""Seconds of watching before ``end`` judges orphans: a busy process has a row of utilisation each second."""

LONG_WAIT = 10.0
"""Seconds of waiting that ``end`` says something about."""

_STOPPED = ("T", "t")
"""The kernel's letters for a process that a signal or a debugger has stopped."""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    end = commands.add_parser(
        "end",
        help="end holders by pid, state, owner or GPU, safely",
        description="End the holders that fit every kind of selector given. Without --yes, only list them. "
        "Exit status: 0 all ended or nothing to do, 1 some were refused or did not end, 2 wrong flag, 3 "
        "cannot tell.",
    )
    end.add_argument(
        "--pid", dest="pids", type=pid, action="append", default=[], metavar="PID", help="repeatable"
    )
    end.add_argument(
        "--state", dest="states", action="append", default=[], choices=[state.value for state in State],
        help="repeatable; who does not work is known only after watching for --idle-after",
    )  # fmt: skip
    end.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="NAME or TYPE:NAME, repeatable",
    )  # fmt: skip
    end.add_argument(
        "--gpu", action="append", default=[], metavar="GPU",
        help="index, UUID or device file (/dev/nvidia0), repeatable; a GPU in MIG mode means all its "
        "instances",
    )  # fmt: skip
    end.add_argument(
        "--grace", type=duration, default=10.0, metavar="DURATION",
        help="time from SIGTERM to SIGKILL (default 10s)",
    )  # fmt: skip
    end.add_argument(
        "--working", action="store_true", help="also end orphaned holders that work on a GPU, or may do so"
    )
    end.add_argument("--yes", action="store_true", help="end the holders, instead of only listing them")
    add_control(end)
    add_sampling(end, idle=True)
    add_log(end)
    end.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """End the selected holders, or only list them."""
    selection = Selection(
        frozenset(args.pids),
        frozenset(map(State, args.states)),
        frozenset(args.owners),
        frozenset(args.gpu),
        args.working,
    )
    if selection == Selection():
        raise UsageError("select holders with --pid, --state, --owner or --gpu")
    return run_until_interrupted(_run_end(sampling_config(args), args, selection))


async def _run_end(config: SamplingConfig, args: argparse.Namespace, selection: Selection) -> int:
    config = samples.sample_fast(config)
    host = Host(config.procfs, config.rootfs)
    supervisor = Supervisor(config)
    async with aclosing(samples.own_readings(supervisor)) as readings:  # type: ignore[type-var]
        snapshot, reading, refusals = await _observe(readings, config, args, selection)
        if refusals:
            write_plain("".join(f"{each}\n" for each in refusals))
            return cleanliness.CANNOT_TELL
        own = {supervisor.pid or 0, *_own_pids()}
        targets = [
            _confirm(target, reading, host, selection) for target in select_targets(snapshot, selection, own)
        ]
        missing = selection.pids - {target.pid for target in targets}
        for target in targets:
            write_plain(f"{target.line}\n")
        for pid in sorted(missing):
            write_plain(
                f"pid {pid} is not selected: it holds no GPU memory, or does not fit the other selectors\n"
            )
        unseen = list(_unseen_lines(snapshot, selection.gpus))
        for line in unseen:
            write_plain(f"{line}\n")
        chosen = [target for target in targets if target.refusal is None]
        if not targets:
            write_plain("no holder is selected, there is nothing to end\n")
        complete = len(chosen) == len(targets) and not missing
        if chosen and not args.yes:
            write_plain("nothing was ended: this was a dry run; add --yes to do it\n")
        elif chosen:
            complete = await _end_and_watch(chosen, args.grace, host, reading, readings) and complete
    if not complete:
        return 1
    return cleanliness.CANNOT_TELL if unseen else 0


async def _observe(
    readings: AsyncIterator[Reading], config: SamplingConfig, args: argparse.Namespace, selection: Selection
) -> tuple[Snapshot, Reading, list[str]]:
    """Return what is known of the holders, a sample of our own, and why nothing can be selected."""
    try:
        snapshot = await _ask_exporter(args, selection)
        reading = await readings.__anext__()
    except StartupError as error:
        samples.log_own_look(error)
        reading, snapshot = await _watch_holders(readings, config, args.idle_after, selection)
    refusals = list(_selection_refusals(snapshot, selection))
    if reading.failure is not None and not refusals:
        refusals = [f"cannot say who holds memory ({reading.failure[0]}): {reading.failure[1]}"]
    return snapshot, reading, refusals


async def _ask_exporter(args: argparse.Namespace, selection: Selection) -> Snapshot:
    """Return holders of a sample begun after the question. Raises StartupError without exporter or answer."""
    count = 0
    async with aclosing(samples.follow_exporter(control_socket(args))) as ledgers:  # type: ignore[type-var]
        async for snapshot, _, idle_after, _ in ledgers:
            if args.idle_after is not None and args.idle_after < idle_after:
                raise StartupError(f"--idle-after is shorter than the exporter's {idle_after:g} s")
            count += 1
            watched = (snapshot.time or 0.0) - (snapshot.watched_since or 0.0)
            left = _watch_time(selection, args.idle_after, idle_after) - watched
            known = count >= samples.SAMPLES_MIN and left <= 0
            if count == 1:
                _log_wait(left, "the exporter has just started")
            if known or any(_selection_refusals(snapshot, selection)):
                break
    return _with_idle_threshold(snapshot, args.idle_after, idle_after)


def _log_wait(seconds: float, why: str) -> None:
    """Say what is waited for, if it takes longer than somebody expects of a command."""
    if seconds > LONG_WAIT:
        about = fields(seconds=round(seconds), why=why)
        log.warning("Waiting until the holders were watched for long enough to know who is idle", extra=about)


def _watch_time(selection: Selection, given: float | None, idle_after: float) -> float:
    """Return for how long holders must have been watched: only that can show whether somebody works."""
    spares_working = selection.spares_working_orphans
    if State.IDLE in selection.states or (spares_working and given is not None):
        return idle_after
    return ORPHANS_WATCHED if spares_working else 0.0


def _with_idle_threshold(snapshot: Snapshot, idle_after: float | None, exporters: float) -> Snapshot:
    """Return a snapshot in which nobody is idle for less than the threshold that the user gave."""
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


def _confirm(target: EndTarget, reading: Reading, host: Host, selection: Selection) -> EndTarget:
    """Return a target, refused unless it certainly uses the driver at this moment.

    So nobody is ended only because the exporter says so: the driver lists it now, or it has the driver's
    files open, and nothing that we see ourselves contradicts the state for which it was selected.
    """
    if target.refusal is not None:
        return target
    row = host.row(target.pid)
    if row is None or row.start != target.start:
        return replace(target, refusal="it has ended since")
    if target.pid not in samples.listed_pids(reading.devices) and not open_files(target.pid, DEVICE_PREFIX):
        return replace(target, refusal="the driver does not list it any more, and it has no GPU open")
    if target.pid in selection.pids:
        return target
    return replace(target, refusal=_contradiction(target, reading, row.state, selection))


def _contradiction(target: EndTarget, reading: Reading, state: str, selection: Selection) -> str | None:
    """Return what we see ourselves and what speaks against a target's state, None if nothing does."""
    if State.STOPPED in target.states and state not in _STOPPED:
        return "it is not stopped now; to end it anyway, name it with --pid"
    if selection.working and State.ORPHANED in target.states:
        return None
    rows = (row for device in reading.devices for row in device.process_utilization or ())
    if any(row.pid == target.pid and row.sm for row in rows):
        return "it works on the GPU now; to end it anyway, name it with --pid"
    return None


async def _watch_holders(
    readings: AsyncIterator[Reading], config: SamplingConfig, given: float | None, selection: Selection
) -> tuple[Reading, Snapshot]:
    """Sample until the states of the holders are known, or until the selection cannot be made."""
    idle_after = given or IDLE_AFTER
    tracker = HoldingTracker(idle_after=idle_after, interval=config.interval)
    watch = _watch_time(selection, given, idle_after)
    begun: float | None = None
    count = 0
    async for reading in readings:
        snapshot = tracker.update(reading)
        if begun is None:
            begun = reading.monotonic
            _log_wait(watch, "no exporter has watched them")
        count += 1
        known = count >= samples.SAMPLES_MIN and reading.monotonic - begun >= watch
        if known or any(_selection_refusals(snapshot, selection)):
            break
    return reading, snapshot


def _selection_refusals(snapshot: Snapshot, selection: Selection) -> Iterator[str]:
    if snapshot.host_pid_namespace is not True or not snapshot.up:
        reason, message = snapshot.failure or ("blind", "not in the host's PID namespace")
        yield f"cannot say who holds memory ({reason}): {message}"
        return
    for name in cleanliness.unknown_devices(snapshot, selection.gpus):
        yield f"GPU {name}: {cleanliness.NO_SUCH_GPU}; nothing was ended"


def _unseen_lines(snapshot: Snapshot, gpus: Collection[str]) -> Iterator[str]:
    """Name the selected devices whose holders are not known: they may hold what was to be ended."""
    for device in snapshot.devices:
        if not gpus or cleanliness.device_matches(gpus, device):
            gpu, uuid = device.key
            for reason in cleanliness.unseen_holders(device):
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
            for each in held:
                if each not in listed:
                    self.freed_after.setdefault((each, key), reading.monotonic - self._began)
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
            parts.append(f"{cleanliness.amount(memory)} on GPU {key[0]} {fate}")
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
        write_plain(f"{freed.describe_outcome(each)}\n")
    for line in freed.describe_devices():
        write_plain(f"{line}\n")
    return all(each.ended for each in terminations) and freed.complete(terminations)


def _own_pids() -> Iterator[int]:
    """Yield this program and every ancestor: a shell or a scheduler's epilog must not end itself."""
    import psutil  # noqa: PLC0415 10 ms that only who ends something pays

    process: psutil.Process | None = psutil.Process()
    with suppress(psutil.Error):  # a process that has just ended has no ancestors any more
        while process is not None:
            yield process.pid
            process = process.parent()
