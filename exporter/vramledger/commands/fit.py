"""Run ``vramledger fit``: what a program needs at its peak, and which GPUs have that."""

from __future__ import annotations

import argparse
import json
import time
import zlib
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.discovery import agent_joiner
from vramledger.commands import fit_verdict
from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config
from vramledger.commands.fit_input import (
    Busy,
    CgroupRoom,
    DeviceUse,
    LedgerSample,
    OfferedDevice,
    Program,
    read_ledger,
    read_oom_report,
)
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.commands.past import add_storage, ask_moment, past_time
from vramledger.commands.samples import SAMPLES_MIN, exporter_snapshots
from vramledger.config import IDLE_AFTER
from vramledger.errors import RecordingError, StartupError, UsageError
from vramledger.exchange import read_json
from vramledger.model.records import JSON_VERSION, Json
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import FORMAT, open_recording, read_recording
from vramledger.sampling.supervisor import Supervisor
from vramledger.serving.source import snapshots
from vramledger.views.ledger_json import snapshot_json
from vramledger_agent.commands.parser import Commands, add_agent_socket, add_log, duration, pid, write_output
from vramledger_agent.printable import gib, printable

_MAX_FILE_BYTES = 256 * 2**20
_MAX_HEAD_BYTES = 2**16
_MAX_VALUES = 2_000_000
"""JSON values of a file. However short they are there, each takes up to 180 bytes here and 3 microseconds."""

_PIDS_SHOWN = 8
_MOST = 1000
"""The programs that are counted, and the devices whose peaks are remembered; a file may have more."""


class Seen(NamedTuple):
    """What was seen of a program."""

    program: Program  # the program
    uses: tuple[DeviceUse, ...]  # for each device that it holds memory on, what was seen in all samples
    ledger: LedgerSample | None  # the newest sample; None for a report, which has none
    origin: str  # where this comes from, a sentence


async def watch_host(args: argparse.Namespace, seconds: float) -> tuple[list[LedgerSample], str]:
    """Return the samples of this host over a time, and who took them."""
    try:
        return await _collect(
            exporter_snapshots(control_socket(args)), seconds
        ), "by the exporter of this host"
    except StartupError as error:
        return await _collect(_own_snapshots(args), seconds), f"by this command alone ({error})"


async def _collect(samples: AsyncIterator[Snapshot], seconds: float) -> list[LedgerSample]:
    found: list[LedgerSample] = []
    end = time.monotonic() + seconds
    async with aclosing(samples) as published:  # type: ignore[type-var]
        async for snapshot in published:
            found.append(_ledger(snapshot))
            if not snapshot.up or time.monotonic() >= end:
                break
    return found


async def _own_snapshots(args: argparse.Namespace) -> AsyncIterator[Snapshot]:
    """Sample, and leave out the first samples, which precede the facts of the processes."""
    source = Supervisor(sampling_config(args))
    tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=args.interval)
    attach = agent_joiner(args.agent_socket)
    async with aclosing(snapshots(source, tracker, attach)) as published:  # type: ignore[type-var]
        async for snapshot in published:
            if not snapshot.up or snapshot.serial >= SAMPLES_MIN:
                yield snapshot


def _ledger(snapshot: Snapshot) -> LedgerSample:
    return read_ledger(snapshot_json(snapshot), "the sample")


def choose_program(ledgers: Iterable[LedgerSample], pid: int | None, origin: str) -> Seen:
    """Return what was seen of a program, or of the only one. Raises StartupError if none, or several.

    No ledger is kept: there may be any number of them.
    """
    holders: set[int] = set()
    newest: LedgerSample | None = None
    started: float | None = None
    failure = ""
    uses: dict[str, DeviceUse] = {}
    for ledger in ledgers:
        failure = failure or ledger.failure
        holders.update(ledger.programs if pid is None else {pid} & ledger.programs.keys())
        if len(holders) > _MOST:
            break
        chosen = next(iter(holders), 0)
        if chosen not in ledger.programs:
            continue
        newest, begun = ledger, ledger.programs[chosen].started
        held = {use.uuid for use in ledger.uses[chosen]}
        if begun is not None and abs(begun - (started or begun)) >= 1.0:
            uses.clear()  # they were an earlier program's
        if len(uses) > _MOST:
            uses = {uuid: use for uuid, use in uses.items() if uuid in held}
        started = started if begun is None else begun
        for use in ledger.uses[chosen]:
            uses[use.uuid] = use.after(uses[use.uuid]) if use.uuid in uses else use
    if newest is None or len(holders) > 1:
        count = f"more than {_MOST}" if len(holders) > _MOST else len(holders)
        shown = ", ".join(map(str, sorted(holders)[:_PIDS_SHOWN]))
        raise StartupError(
            f"pid {pid} holds no GPU memory that we can see ({failure or origin})"
            if pid is not None
            else f"{origin}: {count} programs hold GPU memory ({shown}); choose one with --pid"
            if holders
            else f"{origin}: no program holds GPU memory"
        )
    found = tuple(use for uuid, use in uses.items() if uuid in held)
    return Seen(newest.programs[chosen], found, newest, origin)


def read_file(path: Path, pid: int | None) -> Seen:
    """Return what a file says. Raises RecordingError if unreadable, StartupError without the program."""
    documents = _documents(path, _read_content(path))
    first = documents[0]
    origin = f"from {path.name}"
    if isinstance(first, dict) and first.get("format") == FORMAT:
        tracker = HoldingTracker(idle_after=IDLE_AFTER, source="replay", recording=path.name)
        return choose_program(
            (_ledger(tracker.update(reading)) for reading in read_recording(path)), pid, origin
        )
    if isinstance(first, dict) and "requested" in first and "pool" in first:
        program, uses = read_oom_report(first, str(path))
        if pid is not None and pid != program.pid:
            raise UsageError(f"{path} is the report of pid {program.pid}, not of pid {pid}")
        return Seen(program, uses, None, f"{origin}, written as an allocation failed")
    ledgers = (read_ledger(each, f"{path}, document {number}") for number, each in enumerate(documents, 1))
    return choose_program(ledgers, pid, origin)


def _read_content(path: Path) -> bytes:
    try:
        with open_recording(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RecordingError(f"cannot read {path}: {reason}") from error
    return content


def _documents(path: Path, content: bytes) -> list[Any]:
    """Return a file's JSON documents: one in all, or one a line; of a recording only the header."""
    head = _parse([content[:_MAX_HEAD_BYTES].lstrip().partition(b"\n")[0]])
    if head and isinstance(head[0], dict) and head[0].get("format") == FORMAT:
        return head
    if len(content) > _MAX_FILE_BYTES:
        raise RecordingError(f"{path} is longer than {_MAX_FILE_BYTES // 2**20} MiB; keep a part of it")
    if sum(map(content.count, (b",", b"[", b"{", b"\n"))) > _MAX_VALUES:
        raise RecordingError(f"{path} has more than {_MAX_VALUES:,} values; keep a part of it")
    lines = [line for line in content.split(b"\n") if line.strip()]
    found = _parse(lines) or _parse([content])
    if not found:
        raise RecordingError(
            f"{path} is neither a recording, nor what 'vramledger show --json' prints, nor an out-of-memory "
            "report (oom-*.json)"
        )
    return found


def _parse(texts: Sequence[bytes]) -> list[Any]:
    try:
        return [read_json(each) for each in texts]
    except ValueError:
        return []


FITS, DOES_NOT_FIT, CANNOT_TELL = 0, 1, 3

_MANY = 100
"""More copies than this are not counted: a share of less than a hundredth is not measured well."""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    fit = commands.add_parser(
        "fit",
        help="show what a program needs, where it fits, and the limit to set",
        description="Show what a program needs at its peak, which GPUs here have that free now, how many "
        "such programs fit on one, and how to limit it to its need. Exit status: 0 it fits on a GPU here "
        "now, 1 it does not, 3 cannot tell.",
    )
    fit.add_argument(
        "what", metavar="PID|FILE",
        help="a running program; or a recording, what 'show --json' printed, or an out-of-memory report",
    )  # fmt: skip
    fit.add_argument(
        "--pid", type=pid, default=None, metavar="PID", help="which program of FILE, if it shows several"
    )
    fit.add_argument(
        "--for", dest="seconds", type=duration, default=5.0, metavar="DURATION",
        help="how long to watch how busy it is (default 5s)",
    )  # fmt: skip
    fit.add_argument(
        "--at", type=past_time, default=None, metavar="TIME",
        help="the need as it was then: 03:12, -6h; needs serve --storage.path",
    )  # fmt: skip
    fit.add_argument(
        "--headroom", type=share, default=fit_verdict.HEADROOM, metavar="SHARE",
        help="how much larger a pool must be than what is in use at the peak (default 10%%)",
    )  # fmt: skip
    fit.add_argument("--json", action="store_true", help="print JSON")
    add_storage(fit)
    add_agent_socket(fit)
    add_control(fit)
    add_sampling(fit)
    add_log(fit)
    fit.set_defaults(run=run)


def share(text: str) -> float:
    """Read a share: ``10%`` or ``0.1``."""
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        found = float(number) / (100 if percent else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write for example 10%")
    return found


def run(args: argparse.Namespace) -> int:
    """Print what a program needs and where it fits."""
    fit = run_until_interrupted(_fit(args))
    write_output(
        json.dumps(fit_json(fit)) + "\n" if args.json else "".join(f"{each}\n" for each in fit_lines(fit))
    )
    return fit.status


class Fit(NamedTuple):
    """The whole answer."""

    seen: Seen  # what was seen of the program
    needs: tuple[fit_verdict.MemoryNeed, ...]  # of each device that it holds memory on, the largest first
    offers: tuple[tuple[fit_verdict.Offer, ...], ...]  # of each device here, for each need
    here: str  # where the devices are from, a sentence
    of_this_host: bool  # the devices are those of this host, as they are now
    headroom: float  # as chosen

    @property
    def status(self) -> int:
        """Return the exit status."""
        found = [each for each in zip(self.needs, self.offers, strict=True) if not each[0].unused]
        wanted = [offers for _, offers in found]
        if not self.of_this_host:
            return CANNOT_TELL
        if fit_verdict.assign_devices(wanted):
            return FITS
        unsure = any(
            each.verdict in (fit_verdict.PERHAPS, fit_verdict.UNKNOWN)
            or (each.verdict == fit_verdict.AFTER and need.bytes is None)
            for need, offers in found
            for each in offers
        )
        return CANNOT_TELL if unsure or not any(wanted) else DOES_NOT_FIT


async def _fit(args: argparse.Namespace) -> Fit:
    number = int(args.what) if args.what.isascii() and args.what.isdigit() else None
    if number is None and args.at is not None:
        raise UsageError("--at is for a PID; a FILE has its own time")
    if number == 0:
        raise UsageError("0 is not a process id")
    if number is not None and args.pid is not None:
        raise UsageError("--pid chooses a program of a FILE; give one PID")
    if number is not None and args.at is None:
        ledgers, by = await watch_host(args, args.seconds)
        seen = choose_program(ledgers, number, f"seen {by}")
        return _compare(args, seen, seen.ledger, by, live=True)
    if number is None:
        seen = read_file(Path(args.what), args.pid)
    else:
        _, answer, _ = await ask_moment(args, args.at)
        seen = choose_program([_ledger(answer.snapshot)], number, "as it was stored")
    ledgers, by = await watch_host(args, 0.0)
    return _compare(args, seen, ledgers[-1] if ledgers else None, by, live=False)


def _compare(args: argparse.Namespace, seen: Seen, now: LedgerSample | None, by: str, *, live: bool) -> Fit:
    """Judge the need, and compare it with the devices of this host, or else with those of the file."""
    devices: Sequence[OfferedDevice] = () if now is None else now.devices
    here = f"the GPUs of this host, seen {by}"
    of_this_host = bool(devices)
    if not devices:
        problem = "no sample" if now is None else now.failure or "no GPU"
        devices = () if seen.ledger is None else seen.ledger.devices
        here = f"no GPU to look at here ({problem})"
        if devices:
            here += f"; these are the GPUs {seen.origin}, as they were then"
            live = True
    needs = sorted(
        (fit_verdict.assess_need(use, args.headroom) for use in seen.uses),
        key=lambda need: -(need.enough or need.bytes or need.most or 0),
    )
    offers = tuple(
        tuple(fit_verdict.make_offer(need, device, seen.program, live=live) for device in devices)
        for need in needs
    )
    return Fit(seen, tuple(needs), offers, here, of_this_host, args.headroom)


def fit_lines(fit: Fit) -> Iterator[str]:
    """Return the answer for people."""
    return (printable(line) for line in _text(fit))


def _text(fit: Fit) -> Iterator[str]:
    program = fit.seen.program
    owner = f", of {' '.join(program.owner)}" if program.owner[0] else ""
    yield f"pid {program.pid}  {program.command or 'unknown program'}{owner}; {fit.seen.origin}"
    for need, offers in zip(fit.needs, fit.offers, strict=True):
        yield from _need_lines(need, fit.headroom)
        if not need.unused:
            yield from _offer_lines(need, offers)
            yield from _limit_lines(need, offers, fit.headroom)
            yield from (f"    advice       {each.advice}" for each in need.frameworks if each.advice)
    yield f"  {fit.here}"


def _place(gpu: int | None, name: str) -> str:
    return f"GPU {'?' if gpu is None else gpu} {name}"


def _need_lines(need: fit_verdict.MemoryNeed, headroom: float) -> Iterator[str]:
    use = need.use
    yield f"  on {_place(use.gpu, use.name)}"
    yield f"    holds        {gib(use.held)} now, {gib(need.most)} at most so far"
    if need.unused:
        yield "    needs        nothing but its context here: it has used no memory of this GPU"
        yield "    limit        CUDA_VISIBLE_DEVICES without this GPU (environment): the program needs it not"
        return
    if need.bytes is None:
        known = "not known" if need.enough is None else f"no more than {gib(need.enough)}"
        yield f"    needs        {known} ({need.grade.value}): {need.why}"
    else:
        yield f"    needs        {gib(need.bytes)} at its peak ({need.grade.value}): {need.why}"
        if use.held is not None and use.held - need.bytes > fit_verdict.MIB:
            yield f"    unneeded     {gib(use.held - need.bytes)} of what it holds now"
        if not need.failed:
            yield (
                f"    plan with    {gib(need.planned)}: the pool has {headroom:.0%} more, and at least "
                f"{gib(fit_verdict.HEADROOM_LEAST if headroom else 0)}, for rounding and gaps"
            )
    if need.failed:
        wanted = "not known" if need.wanted is None else gib(need.wanted)
        size = "" if use.failed_request is None else f" of {gib(use.failed_request)}"
        yield f"    wanted       {wanted}: an allocation{size} failed, and others might have followed"
    yield from _compute_lines(need)


def _compute_lines(need: fit_verdict.MemoryNeed) -> Iterator[str]:
    time_busy, sm_busy = need.use.time_busy, need.use.sm_busy
    if time_busy is None:
        yield (
            "    compute      not known: the driver does not say how busy it keeps the GPU, and beside other "
            "holders never"
        )
        return
    text = f"busy {_busy_text(time_busy)}"
    copies = fit_verdict.copies_by_compute(time_busy)
    if copies == 1:
        text += ", so no second one runs beside it at full speed"
    else:
        text += f", so {_copies(copies)} take turns at full speed" if copies else ": it did not work then"
    if sm_busy is not None and fit_verdict.copies_by_compute(sm_busy):
        text += f"; its kernels fill {_busy_text(sm_busy)} of the SMs, so with MPS at best "
        text += _copies(fit_verdict.copies_by_compute(sm_busy))
    yield f"    compute      {text}"


def _busy_text(busy: Busy) -> str:
    highest = f", at most {busy.highest:.0%}" if busy.samples > 1 else ""
    return f"{busy.mean:.0%}{highest}"


def _copies(copies: int | None) -> str:
    if copies is None:
        return "not known"
    return f"{_MANY} or more" if copies >= _MANY else str(copies)


def _offer_lines(need: fit_verdict.MemoryNeed, offers: Sequence[fit_verdict.Offer]) -> Iterator[str]:
    for offer in offers:
        device = offer.device
        parts = [_verdict_text(need, offer)]
        if offer.limit is not None:
            parts.append(_limit_text(offer.limit))
        if offer.reserved:
            parts.append(offer.reserved)
        if offer.runs_here:
            parts.append("runs here now; its own memory is counted as free")
        if offer.copies_empty is not None and offer.verdict != fit_verdict.UNKNOWN:
            parts.append(f"by memory {offer.copies_now} now, {offer.copies_empty} on the empty GPU")
        yield f"    {_place(device.gpu, device.name)}  {'; '.join(parts)}"
        for each in offer.evict:
            yield f"      {gib(each.bytes)} of {each.what}, if its user agrees: `{each.command}`"


def _limit_text(limit: CgroupRoom) -> str:
    if not limit.cgroup:
        return "cgroups may be limited here, and it is not known whether its own is"
    if limit.maximum is None:
        return f"its cgroup {limit.cgroup} has a limit elsewhere, and what it may take here is not known"
    taken = f"an unknown part of {gib(limit.maximum)} is"
    if limit.used is not None:
        taken = f"{gib(limit.used)} of {gib(limit.maximum)} are"
    return f"limited by its cgroup {limit.cgroup}: {taken} taken"


def _verdict_text(need: fit_verdict.MemoryNeed, offer: fit_verdict.Offer) -> str:
    room = f"{gib(offer.room)} free"
    if offer.verdict == fit_verdict.AFTER:
        gained = sum(each.bytes for each in offer.evict)
        return f"NOT NOW: {room}, and {gib(gained)} more after"
    if offer.verdict == fit_verdict.NO:
        wanted = need.bytes or need.enough or 0
        empty = "also when empty: " if (offer.device.capacity or 0) < wanted else ""
        return f"NO: {empty}{room}"
    return {
        fit_verdict.YES: f"FITS: {room}",
        fit_verdict.TIGHT: f"TIGHT: {room}, enough for its peak without headroom",
        fit_verdict.PERHAPS: f"PERHAPS: {room}, {_doubt(need, offer)}",
        fit_verdict.UNKNOWN: f"NOT KNOWN: {offer.device.problem or 'its free memory is not known'}",
    }[offer.verdict]


def _doubt(need: fit_verdict.MemoryNeed, offer: fit_verdict.Offer) -> str:
    if need.bytes is not None and offer.limit is not None and not offer.limit.known:
        return "but its cgroup may leave it less"
    if need.bytes is None:
        return "but its need is not known"
    if need.wanted is None:
        return "enough for what it had, but it is not known how much more the allocation that failed needed"
    also = "also" if (offer.room or 0) >= need.wanted else "but not"
    return f"enough for what it had, {also} for the allocation that failed"


def _limit_lines(
    need: fit_verdict.MemoryNeed, offers: Sequence[fit_verdict.Offer], headroom: float
) -> Iterator[str]:
    device = next((each.device for each in offers if each.usable), need.use)
    place = _place(device.gpu, device.name)
    for advice in fit_verdict.limit_advice(need, device.capacity, headroom):
        yield f"    limit        {advice.text}"
        yield f"                 {advice.where}, {advice.framework} on {place}: {advice.about}"


def fit_json(fit: Fit) -> dict[str, Json]:
    """Return the answer as JSON values: bytes and shares; null means not known."""
    program = fit.seen.program
    return {
        "version": JSON_VERSION,
        "pid": program.pid,
        "command": program.command or None,
        "owner": {"type": program.owner[0], "name": program.owner[1]} if program.owner[0] else None,
        "origin": fit.seen.origin,
        "devices_origin": fit.here,
        "headroom": fit.headroom,
        "fits": {FITS: True, DOES_NOT_FIT: False}.get(fit.status),
        "needs": [
            _need_json(need, offers, fit.headroom) for need, offers in zip(fit.needs, fit.offers, strict=True)
        ],
    }


def _need_json(
    need: fit_verdict.MemoryNeed, offers: Sequence[fit_verdict.Offer], headroom: float
) -> dict[str, Json]:
    use = need.use
    return {
        "gpu": use.gpu, "uuid": use.uuid, "name": use.name, "held": use.held, "held_peak": need.most,
        "needed": need.bytes, "planned": need.planned, "failed": need.failed, "wanted": need.wanted,
        "unused": need.unused, "advice": [each.advice for each in need.frameworks if each.advice],
        "grade": need.grade.value, "why": need.why,
        "time_busy": _busy_json(need.use.time_busy),
        "sm_busy": _busy_json(need.use.sm_busy),
        "copies_by_time": fit_verdict.copies_by_compute(need.use.time_busy),
        "copies_by_sm": fit_verdict.copies_by_compute(need.use.sm_busy),
        "devices": [
            {
                "gpu": offer.device.gpu, "uuid": offer.device.uuid, "name": offer.device.name,
                "verdict": offer.verdict, "problem": offer.device.problem or None, "free": offer.device.free,
                "room": offer.room, "capacity": offer.device.capacity, "runs_here": offer.runs_here,
                "allowed": offer.allowed, "reserved": offer.reserved or None,
                "cgroup_limit": None if offer.limit is None else dict(offer.limit._asdict()),
                "copies_now": offer.copies_now,
                "copies_empty": offer.copies_empty,
                "evict": [dict(each._asdict()) for each in offer.evict],
                "limits": [
                    dict(each._asdict())
                    for each in fit_verdict.limit_advice(need, offer.device.capacity, headroom)
                ],
            }
            for offer in offers
        ],
    }  # fmt: skip


def _busy_json(busy: Busy | None) -> Json:
    return None if busy is None else dict(busy._asdict())
