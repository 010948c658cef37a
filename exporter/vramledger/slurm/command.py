"""Run ``vramledger slurm``: what the scripts of deploy/slurm ask in a prolog, an epilog and a health check.

It judges, keeps the records of jobs, and in an epilog ends what is left of the job. It never talks to Slurm:
the scripts drain and resume.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from vramledger.accounting.owners.reservations import fits
from vramledger.accounting.tracker import HoldingTracker
from vramledger.commands import samples
from vramledger.commands.arguments import add_sampling, sampling_config, size
from vramledger.commands.interrupts import run_until_interrupted
from vramledger.config import IDLE_AFTER, SamplingConfig
from vramledger.errors import UsageError
from vramledger.model.reading import DeviceReading, HiddenHolder, ProcessRow, Reading
from vramledger.model.records import write_record
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.host_files import HostFiles
from vramledger.sampling.supervisor import Supervisor
from vramledger.slurm.jobs import (
    RECORDS,
    JobRecord,
    NodeJobs,
    job_numbers,
    job_of,
    members,
    possible_jobs,
    read_records,
    running_jobs,
)
from vramledger.slurm.names import devices_of, parse_capabilities, parse_gres
from vramledger.verdicts import cleanliness
from vramledger_agent.commands.parser import Commands, add_log, duration
from vramledger_agent.printable import printable, write_plain

JobsOf = Callable[[int], Collection[str]]
"""Return the jobs to which a process may belong."""


class SlurmQuestion(Struct, frozen=True):
    """What a script asks."""

    # the devices to judge, as Slurm's configuration names them; None for all of the host
    devices: tuple[str, ...] | None
    ended: str  # the job that has ended, so that nothing of it may be left; empty outside an epilog
    tolerance: cleanliness.CheckTolerance  # what a clean device may have


def check_job_devices(
    snapshot: Snapshot,
    question: SlurmQuestion,
    jobs: NodeJobs,
    jobs_of: JobsOf,
    search: cleanliness.SearchExtent | None = None,
) -> list[cleanliness.CheckResult]:
    """Judge the devices, provisionally without a ``search``; an unlisted one cannot be judged.

    What belongs to a running job, on a device that Slurm gave to it, is not left over: so shared GPUs
    (``--gres=shard``, MPS) are judged without knowing how. To know less of jobs is never harsher.
    """
    readings = tuple(each.reading for each in snapshot.devices)
    devices = tuple(
        _without_running_jobs(each, readings, question, jobs, jobs_of) for each in snapshot.devices
    )
    snapshot = replace(snapshot, devices=devices)
    if question.devices is None or not snapshot.up:
        return cleanliness.check_devices(snapshot, (), question.tolerance, search=search)
    wanted, missing = set[str](), []
    for name in question.devices:
        found = {each.uuid for each in readings if fits(name, each)}
        wanted |= found
        if not found:
            reasons = (cleanliness.CheckReason("missing", cleanliness.NO_SUCH_GPU),)
            missing.append(cleanliness.CheckResult(name, "", cleanliness.CANNOT_TELL, reasons))
    judged = cleanliness.check_devices(snapshot, wanted, question.tolerance, search=search) if wanted else []
    return judged + missing


def _without_running_jobs(
    device: DeviceSnapshot,
    readings: tuple[DeviceReading, ...],
    question: SlurmQuestion,
    jobs: NodeJobs,
    jobs_of: JobsOf,
) -> DeviceSnapshot:
    """Return a device without what running jobs may have on it.

    If something was taken off, bytes that NVML charges to nobody may be those jobs' managed memory, so they
    are not judged.
    """
    siblings = tuple(each for each in readings if each.minor == device.reading.minor)
    kept = tuple(
        each
        for each in device.holdings
        if not _may_be_here(jobs_of(each.pid), (device.reading,), question, jobs)
    )
    hidden: tuple[HiddenHolder, ...] | None = device.hidden and tuple(
        each for each in device.hidden if not _may_be_here(jobs_of(each.pid), siblings, question, jobs)
    )
    ledger = device.ledger
    if ledger is not None and len(kept) < len(device.holdings):
        ledger = replace(ledger, unattributed=0)
    return replace(device, holdings=kept, hidden=hidden, ledger=ledger)


def _may_be_here(
    possible: Collection[str], devices: tuple[DeviceReading, ...], question: SlurmQuestion, jobs: NodeJobs
) -> bool:
    """Tell whether a job runs here, as far as is known; a SLUID without a record may be any."""
    return any(_has_one(job, devices, jobs) for job in possible if job != question.ended)


def _has_one(job: str, devices: tuple[DeviceReading, ...], jobs: NodeJobs) -> bool:
    if job not in jobs.running and (job.isdigit() or not jobs.running):
        return False
    record = jobs.records.get(job)
    if record is None or record.devices is None:
        return True
    return any(fits(name, device) for name in record.devices for device in devices)


_SHORT = {
    "no-data": "no answer",
    "no-list": "no list",
    "no-book": "no ledger",
    "timeout": "no answer",
    "internal": "driver fails",
}


def reason_line(results: list[cleanliness.CheckResult], snapshot: Snapshot | None) -> str:
    """Return a drained node's reason; ``sinfo -R`` shows 20 characters: the GPU, holder and bytes."""
    status = cleanliness.overall_status(results)
    parts = (
        sorted(
            (-(reason.memory or 0), result.gpu, result.uuid, position, reason)
            for result in results
            if result.status == status
            for position, reason in enumerate(result.reasons)
            if reason.counts or (status == cleanliness.CANNOT_TELL)
        )
        if status in (cleanliness.NOT_CLEAN, cleanliness.CANNOT_TELL)
        else []
    )
    if not parts:
        return "vram? no answer: no sample has finished" if status == cleanliness.CANNOT_TELL else ""
    _, gpu, uuid, _, worst = parts[0]
    more = f"; +{len(parts) - 1} more" if len(parts) > 1 else ""
    tail = f"; {uuid}" if uuid else ""
    if status == cleanliness.CANNOT_TELL:
        where = f"GPU{gpu} " if gpu != "all" else ""
        return printable(f"vram? {where}{_SHORT.get(worst.kind, worst.kind)}: {worst.text}{more}{tail}")
    size = "" if worst.memory is None else f" {worst.memory / 2**20:.0f}MiB"
    if (worst.memory or 0) >= 2**30:
        size = f" {(worst.memory or 0) / 2**30:.0f}GiB"
    return printable(f"vram GPU{gpu} {_who(worst, snapshot)}{size}: {worst.text}{more}{tail}")


def _who(reason: cleanliness.CheckReason, snapshot: Snapshot | None) -> str:
    if reason.kind == "dead":
        return "dead"
    if reason.kind == "unusable":
        return "unusable"
    if reason.pid is None:
        return "nobody"
    facts = snapshot.facts_of(reason.pid) if snapshot is not None else None
    return (facts.user if facts is not None else None) or next(iter(_hidden_users(reason, snapshot)), "?")


def _hidden_users(reason: cleanliness.CheckReason, snapshot: Snapshot | None) -> Iterator[str]:
    for device in snapshot.devices if snapshot is not None else ():
        yield from (each.user for each in device.hidden or () if each.pid == reason.pid and each.user)


LAST_SECONDS = 0.5
"""Seconds of the wait that are kept for the end of the sampler, so that the answer comes in time."""

ATTEMPTS = 3
"""How often a mute driver is asked during the wait: one that is slow once gets a third of it."""

_CONTEXTS = ("prolog", "epilog", "health")


class SlurmJob(Struct, frozen=True):
    """The job of slurmd's script, by its environment; ``gpus`` is empty without any and in a health check."""

    number: str = ""
    gpus: str = ""
    node: str = "localhost"
    sluid: str = ""
    uid: int | None = None
    user: str = ""
    account: str = ""


def add_command(commands: Commands) -> None:
    """Declare the command."""
    command = commands.add_parser(
        "slurm",
        help="judge the GPUs of a Slurm job, for its prolog, its epilog or the node's health check",
        description="Judge GPUs for the scripts of deploy/slurm, which drain and resume the node. The job "
        "is taken from slurmd's environment. In an epilog, what is left of the job is ended. Prints "
        "the reason in one line. Exit status: 0 clean, 1 not clean, 2 wrong flag, 3 cannot tell.",
    )
    command.add_argument("context", choices=_CONTEXTS, help="which script asks")
    command.add_argument(
        "--gres",
        type=Path,
        metavar="FILE",
        help="what 'slurmd -G' prints: which GPU each of Slurm's numbers is",
    )
    command.add_argument(
        "--wait", type=duration, default=30.0, metavar="DURATION",
        help="when there is an answer at the latest (default 30s)",
    )  # fmt: skip
    command.add_argument(
        "--settle", type=duration, default=20.0, metavar="DURATION",
        help="how long a GPU may take to become clean, from the first sample on (default 20s)",
    )  # fmt: skip
    command.add_argument(
        "--grace", type=duration, default=5.0, metavar="DURATION",
        help="epilog: time from SIGTERM to SIGKILL for what is left of the job (default 5s)",
    )  # fmt: skip
    command.add_argument(
        "--end", action=argparse.BooleanOptionalAction, default=True,
        help="epilog: end what is left of the job (default on)",
    )  # fmt: skip
    command.add_argument(
        "--max-leftover", dest="leftover", type=size, default=cleanliness.MAX_LEFTOVER, metavar="SIZE",
        help="ignore this much dead, zombie, stuck, orphaned and unattributed memory (default 128MiB)",
    )  # fmt: skip
    command.add_argument(
        "--owner", dest="owners", action="append", default=[], metavar="OWNER",
        help="allow live processes of this owner, NAME or TYPE:NAME; repeatable",
    )  # fmt: skip
    command.add_argument(
        "--records", type=Path, default=Path("/", RECORDS), metavar="DIR",
        help="where the devices of running jobs are recorded (default %(default)s)",
    )  # fmt: skip
    add_sampling(command)
    add_log(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the reason, if there is one; the exit status says the same."""
    job = _read_job(os.environ)
    if args.context != "health" and not job.number:
        raise UsageError("SLURM_JOB_ID is not set: slurmd runs this command, in a prolog or an epilog")
    config = sampling_config(args)
    config = replace(
        samples.sample_fast(config, frozenset({"ledger", "process", "hardware"})),
        timeout=max(config.timeout, args.wait / ATTEMPTS),
    )
    gres = _read_gres(args.gres, config.procfs)
    devices = devices_of(job.gpus, gres) if args.context != "health" else None
    question = SlurmQuestion(
        # Where it cannot be known which GPUs are the job's, those that Slurm manages are judged.
        devices=devices or gres,
        ended=job.number if args.context == "epilog" else "",
        tolerance=cleanliness.CheckTolerance(args.leftover, owners=frozenset(args.owners)),
    )
    record = args.records / "jobs" / job.node / job.number
    if args.context == "prolog":
        _write_record(record, job, devices)
    if args.context != "health" and not job.gpus:
        status, line = cleanliness.CLEAN, ""
    else:
        ending = None
        if question.ended and args.end:
            ending = _JobEnding(Host(config.procfs, config.rootfs), question.ended, args.grace)
        check = _NodeCheck(config, question, args.records, ending, args.settle)
        status, line = run_until_interrupted(check.run(max(0.1, args.wait - LAST_SECONDS)))
    if args.context == "epilog":
        record.unlink(missing_ok=True)
    if line:
        write_plain(f"{line}\n")
    return status


def _read_job(environment: Mapping[str, str]) -> SlurmJob:
    def value(name: str) -> str:
        return environment.get(name, "")

    visible = value("CUDA_VISIBLE_DEVICES")
    # slurmd gives UUIDs where the driver has told it, as for MIG instances that AutoDetect has found.
    named = visible.startswith(("GPU-", "MIG-"))
    uid = value("SLURM_JOB_UID")
    return SlurmJob(
        number=value("SLURM_JOB_ID") if value("SLURM_JOB_ID").isdigit() else "",
        gpus=visible if named else value("SLURM_JOB_GPUS") or visible,
        node=value("SLURMD_NODENAME").replace("/", "_").strip(".") or "localhost",
        sluid=value("SLURM_JOB_SLUID"),
        uid=int(uid) if uid.isdigit() else None,
        user=value("SLURM_JOB_USER"),
        account=value("SLURM_JOB_ACCOUNT"),
    )


def _read_gres(path: Path | None, procfs: Path) -> tuple[str, ...] | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    capabilities = ""
    with suppress(OSError):
        capabilities = (procfs / "driver/nvidia-caps/mig-minors").read_text(
            encoding="ascii", errors="replace"
        )
    return parse_gres(text, parse_capabilities(capabilities))


def _write_record(path: Path, job: SlurmJob, devices: tuple[str, ...] | None) -> None:
    """Write the record of a job, for the exporter and for the scripts of other jobs."""
    given: tuple[str, ...] | None = devices if job.gpus else ()
    record = JobRecord(job.number, job.sluid, job.uid, job.user, job.account, given)
    with suppress(OSError):
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(write_record(record) + b"\n")
        fresh.replace(path)


class _NodeCheck:
    def __init__(
        self,
        config: SamplingConfig,
        question: SlurmQuestion,
        records: Path,
        ending: _JobEnding | None,
        settle: float,
    ) -> None:
        self._config = config
        self._question = question
        self._settle = settle
        self._host = Host(config.procfs, config.rootfs)
        self._records = str(records.resolve()).strip("/")
        self._ending = ending
        self._snapshot: Snapshot | None = None
        self._results: list[cleanliness.CheckResult] = []

    async def run(self, wait: float) -> tuple[int, str]:
        """Return the exit status and the reason: the last answer that there was in ``wait`` seconds."""
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._watch(), wait)
        status = cleanliness.overall_status(self._results)
        return status, reason_line(self._results, self._snapshot) if status != cleanliness.CLEAN else ""

    async def _watch(self) -> None:
        supervisor = Supervisor(self._config)
        tracker = HoldingTracker(idle_after=IDLE_AFTER, interval=self._config.interval)
        clean, unclean = 0, 0.0
        async with aclosing(samples.own_readings(supervisor)) as readings:  # type: ignore[type-var]
            async for reading in readings:
                snapshot = tracker.update(reading)
                # In a thread: the files of a process that is stuck may hang, and the wait is over all the
                # same.
                self._snapshot, provisional, self._results = await asyncio.to_thread(
                    self._check, snapshot, None, supervisor.pid
                )
                status = cleanliness.overall_status(provisional)
                clean = clean + 1 if status == cleanliness.CLEAN else 0
                now = time.monotonic()
                unclean = unclean or now
                if status == cleanliness.NOT_CLEAN and now - unclean >= self._settle:
                    return
                held = any(device.holdings for device in snapshot.devices)
                if clean >= (samples.SAMPLES_MIN if held else 1):
                    self._snapshot, _, self._results = await asyncio.to_thread(
                        self._check, snapshot, reading, supervisor.pid
                    )
                    if cleanliness.overall_status(self._results) == cleanliness.CLEAN:
                        return
                    clean = 0

    def _check(
        self, snapshot: Snapshot, searched: Reading | None, sampler: int | None
    ) -> tuple[Snapshot, list[cleanliness.CheckResult], list[cleanliness.CheckResult]]:
        """Judge a snapshot; with its reading, also after a search for hidden holders.

        The second results are those to end with if there is no time for more: a search that has not ended is
        not one that has found nothing.
        """
        jobs = NodeJobs(
            running_jobs(self._host),
            read_records(HostFiles(Path("/")), self._records),
            job_numbers(self._host),
        )
        known: dict[int, frozenset[str]] = {}

        def jobs_of(pid: int) -> frozenset[str]:
            if pid not in known:
                row = snapshot.rows.get(pid) or self._host.row(pid)
                known[pid] = frozenset() if row is None else possible_jobs(self._host, row, jobs)
            return known[pid]

        search = cleanliness.SearchExtent(complete=False, unreadable=0)
        if searched is not None:
            holders, search = samples.search_hidden(self._host, searched.devices, sampler)
            snapshot = replace(
                snapshot,
                devices=tuple(
                    replace(each, hidden=samples.hidden_on_gpu(each.reading, holders))
                    for each in snapshot.devices
                ),
            )
        if self._ending is not None:
            held = {each.pid for device in snapshot.devices for each in device.holdings}
            rows = filter(None, map(snapshot.rows.get, held))
            ended = [row for row in rows if job_of(self._host, row, jobs) == self._question.ended]
            self._ending.end(jobs, ended)
        judge = partial(check_job_devices, snapshot, self._question, jobs, jobs_of)
        return snapshot, judge(), judge(search)


class _JobEnding:
    """End what is left of a job: SIGTERM when first seen, SIGKILL when the grace is over."""

    def __init__(self, host: Host, job: str, grace: float) -> None:
        self._host = host
        self._job = job
        self._grace = grace
        self._first: float | None = None
        self._asked: set[tuple[int, int]] = set()
        self._own = set(_ancestors(host))

    def end(self, jobs: NodeJobs, holders: list[ProcessRow]) -> None:
        """Signal the holders that are the job's, and all processes in the job's cgroups."""
        rows = {
            row.pid: row for row in (*holders, *members(self._host, self._job, jobs)) if row.state not in "ZX"
        }
        for row in rows.values():
            if row.pid in self._own or row.pid == 1:
                continue
            self._first = time.monotonic() if self._first is None else self._first
            if time.monotonic() - self._first >= self._grace:
                self._signal(row, signal.SIGKILL)
            elif (row.pid, row.start) not in self._asked:
                self._asked.add((row.pid, row.start))
                self._signal(row, signal.SIGTERM, signal.SIGCONT)

    def _signal(self, row: ProcessRow, *numbers: signal.Signals) -> None:
        """Signal a process through a pidfd, so that no other process with its pid can get it."""
        with suppress(OSError):
            descriptor = os.pidfd_open(row.pid)
            try:
                now = self._host.row(row.pid)
                if now is None or now.start != row.start or select.select([descriptor], [], [], 0)[0]:
                    return
                for number in numbers:
                    signal.pidfd_send_signal(descriptor, number)
            finally:
                os.close(descriptor)


def _ancestors(host: Host) -> Iterator[int]:
    pid = os.getpid()
    while pid > 1 and (row := host.row(pid)) is not None:
        yield pid
        pid = row.ppid
