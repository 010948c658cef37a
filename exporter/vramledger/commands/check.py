"""Run ``vramledger check``: is this GPU clean for the next job?"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial

import msgspec
from msgspec.structs import replace

from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands import samples
from vramledger.commands.arguments import add_control, add_sampling, control_socket, sampling_config, size
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.errors import StartupError
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger.readers.hosts.host import Host
from vramledger.sampling.supervisor import Supervisor
from vramledger.verdicts import cleanliness
from vramledger_agent.commands.parser import Commands, add_log, duration
from vramledger_agent.printable import write_plain


def add_command(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "check",
        help="say by exit status whether this GPU is clean for the next job",
        description="Say whether GPUs are clean for the next job. Exit status: 0 clean, 1 not clean,"
        " 2 wrong flag, 3 cannot tell (no driver, no such GPU, a GPU without data, not in the host's PID "
        "namespace, processes that could not be searched for CUDA).",
    )
    command.add_argument(
        "--gpu", action="append", default=[], metavar="GPU",
        help="index, UUID or device file (/dev/nvidia0), repeatable (default all); a GPU in MIG mode means "
        "all its instances",
    )  # fmt: skip
    command.add_argument(
        "--max-leftover", dest="leftover", type=size, default=cleanliness.MAX_LEFTOVER, metavar="SIZE",
        help="ignore this much dead, zombie, stuck, orphaned and unattributed memory (default 128MiB)",
    )  # fmt: skip
    command.add_argument("--allow-live", dest="live", action="store_true", help="allow live processes")
    command.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="allow live processes of this owner, NAME or TYPE:NAME; repeatable",
    )  # fmt: skip
    command.add_argument(
        "--wait", type=duration, default=5.0, metavar="DURATION",
        help="how long a GPU may take to become clean (default 5s)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON")
    add_control(command)
    add_sampling(command)
    add_log(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the result; the exit status says the same."""
    return run_until_interrupted(_run_check(sampling_config(args), args))


async def _run_check(config: SamplingConfig, args: argparse.Namespace) -> int:
    """Print each device's result, again until clean or ``wait`` is over: an ended process needs a moment."""
    try:
        async with aclosing(samples.exporter_snapshots(control_socket(args))) as snapshots:  # type: ignore[type-var]
            results, since = await _check(snapshots, config, args, lambda: None)
    except StartupError as error:
        samples.log_own_look(error)
        config = samples.sample_fast(config)
        supervisor = Supervisor(config)
        tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=config.interval)
        async with aclosing(samples.own_snapshots(supervisor, tracker)) as snapshots:  # type: ignore[type-var]
            results, since = await _check(snapshots, config, args, lambda: supervisor.pid)
    if args.json:
        write_plain(msgspec.json.encode(cleanliness.leftovers(results, since)).decode() + "\n")
    else:
        write_plain("".join(f"{result.line}\n" for result in results))
    return cleanliness.overall_status(results)


async def _check(
    snapshots: AsyncIterator[Snapshot],
    config: SamplingConfig,
    args: argparse.Namespace,
    sampler_pid: Callable[[], int | None],
) -> tuple[list[cleanliness.CheckResult], float | None]:
    """Return the results, and since when the holders were watched (Unix time)."""
    judge = partial(
        cleanliness.check_devices,
        wanted=frozenset(args.gpu),
        tolerance=cleanliness.CheckTolerance(args.leftover, args.live, frozenset(args.owners)),
    )
    results: list[cleanliness.CheckResult] = []
    since: float | None = None
    count = clean = 0
    deadline = time.monotonic() + args.wait
    async for snapshot in snapshots:
        results, since = judge(snapshot), snapshot.watched_since
        count += 1
        clean = clean + 1 if cleanliness.overall_status(results) == cleanliness.CLEAN else 0
        over = time.monotonic() >= deadline
        # A driver that is slow once may answer the next time; one that is not there does not come.
        slow = snapshot.failure is not None and snapshot.failure[0] == "timeout"
        late = (not snapshot.up and (over or not slow)) or (count >= samples.SAMPLES_MIN and over)
        if clean >= samples.SAMPLES_MIN or (
            late and any(each.status == cleanliness.CLEAN for each in results)
        ):
            searched, search = await asyncio.to_thread(_search, config, sampler_pid(), snapshot)
            results = judge(searched, search=search)
            # A process that the search cannot read will not be readable a moment later either.
            late = late or cleanliness.overall_status(results) != cleanliness.NOT_CLEAN
        if late:
            break
    return results, since


def _search(
    config: SamplingConfig, sampler: int | None, snapshot: Snapshot
) -> tuple[Snapshot, cleanliness.SearchExtent]:
    read = [device.reading for device in snapshot.devices]
    holders, search = samples.search_hidden(Host(config.procfs, config.rootfs), read, sampler)
    devices = tuple(_with_hidden(each, holders) for each in snapshot.devices)
    return replace(snapshot, devices=devices), search


def _with_hidden(device: DeviceSnapshot, holders: tuple[HiddenHolder, ...] | None) -> DeviceSnapshot:
    """Return a device with its hidden holders: those found now, and others that the exporter has found."""
    found = samples.hidden_on_gpu(device.reading, holders)
    if found is None:
        return replace(device, hidden=None)
    pids = {each.pid for each in found}
    return replace(device, hidden=(*found, *(each for each in device.hidden or () if each.pid not in pids)))
