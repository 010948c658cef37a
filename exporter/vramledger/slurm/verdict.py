"""Judge the GPUs of a Slurm job for its prolog or epilog, or those of the node for its health check.

Pure: a snapshot and the node's jobs in, results and one line out. Whatever belongs to a running job, on a
device that Slurm gave to that job, is not left over: so shared GPUs (``--gres=shard``, MPS) are judged
correctly without knowing how they are shared. To know less of jobs never makes a harsher verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from vramledger.accounting.owners.reservations import fits
from vramledger.model.reading import DeviceReading, HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger.slurm.jobs import NodeJobs
from vramledger.verdicts.cleanliness import (
    CANNOT_TELL,
    NO_SUCH_GPU,
    NOT_CLEAN,
    CheckReason,
    CheckResult,
    CheckTolerance,
    SearchExtent,
    check_devices,
    overall_status,
)
from vramledger_agent.printable import printable

JobsOf = Callable[[int], Collection[str]]
"""Return the jobs to which a process may belong."""


@dataclass(frozen=True, slots=True)
class SlurmQuestion:
    """What a script asks."""

    # the devices to judge, as Slurm's configuration names them; None for all of the host
    devices: tuple[str, ...] | None
    ended: str  # the job that has ended, so that nothing of it may be left; empty outside an epilog
    tolerance: CheckTolerance  # what a clean device may have


def check_job_devices(
    snapshot: Snapshot,
    question: SlurmQuestion,
    jobs: NodeJobs,
    jobs_of: JobsOf,
    search: SearchExtent | None = None,
) -> list[CheckResult]:
    """Judge the devices, provisionally without a ``search``; an unlisted one cannot be judged."""
    readings = tuple(each.reading for each in snapshot.devices)
    devices = tuple(
        _without_running_jobs(each, readings, question, jobs, jobs_of) for each in snapshot.devices
    )
    snapshot = replace(snapshot, devices=devices)
    if question.devices is None or not snapshot.up:
        return check_devices(snapshot, (), question.tolerance, search=search)
    wanted, missing = set[str](), []
    for name in question.devices:
        found = {each.uuid for each in readings if fits(name, each)}
        wanted |= found
        if not found:
            reasons = (CheckReason("missing", NO_SUCH_GPU),)
            missing.append(CheckResult(name, "", CANNOT_TELL, reasons))
    judged = check_devices(snapshot, wanted, question.tolerance, search=search) if wanted else []
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


def reason_line(results: list[CheckResult], snapshot: Snapshot | None) -> str:
    """Return a drained node's reason; ``sinfo -R`` shows 20 characters: the GPU, holder and bytes."""
    status = overall_status(results)
    parts = (
        sorted(
            (-(reason.memory or 0), result.gpu, result.uuid, position, reason)
            for result in results
            if result.status == status
            for position, reason in enumerate(result.reasons)
            if reason.counts or (status == CANNOT_TELL)
        )
        if status in (NOT_CLEAN, CANNOT_TELL)
        else []
    )
    if not parts:
        return "vram? no answer: no sample has finished" if status == CANNOT_TELL else ""
    _, gpu, uuid, _, worst = parts[0]
    more = f"; +{len(parts) - 1} more" if len(parts) > 1 else ""
    tail = f"; {uuid}" if uuid else ""
    if status == CANNOT_TELL:
        where = f"GPU{gpu} " if gpu != "all" else ""
        return printable(f"vram? {where}{_SHORT.get(worst.kind, worst.kind)}: {worst.text}{more}{tail}")
    size = "" if worst.memory is None else f" {_size(worst.memory)}"
    return printable(f"vram GPU{gpu} {_who(worst, snapshot)}{size}: {worst.text}{more}{tail}")


def _who(reason: CheckReason, snapshot: Snapshot | None) -> str:
    if reason.kind == "dead":
        return "dead"
    if reason.kind == "unusable":
        return "unusable"
    if reason.pid is None:
        return "nobody"
    facts = snapshot.facts_of(reason.pid) if snapshot is not None else None
    return (facts.user if facts is not None else None) or next(iter(_hidden_users(reason, snapshot)), "?")


def _hidden_users(reason: CheckReason, snapshot: Snapshot | None) -> Iterator[str]:
    for device in snapshot.devices if snapshot is not None else ():
        yield from (each.user for each in device.hidden or () if each.pid == reason.pid and each.user)


def _size(memory: int) -> str:
    return f"{memory / 2**30:.0f}GiB" if memory >= 2**30 else f"{memory / 2**20:.0f}MiB"
