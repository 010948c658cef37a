"""Tell whether a device is clean for the next job: what is left over, which holders live, what is unknown.

Pure: snapshots in, results out. It is for the prolog and epilog of a scheduler, node checks and CI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from vramledger.accounting.owner_usage import UNKNOWN, Key, owner_of
from vramledger.accounting.reservations import MPS_SERVER
from vramledger.model.json_values import Json
from vramledger.model.reading import HiddenHolder, ProcessFacts
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot, State
from vramledger.printable import printable
from vramledger.views.table import gib

CLEAN, NOT_CLEAN, CANNOT_TELL = 0, 1, 3
"""Exit statuses; 2 is a wrong flag."""

MAX_LEFTOVER = 128 * 2**20
"""The bytes that do not count: ``unattributed`` moved between 0 and 66 MiB on a healthy H200, and the MPS
server holds 66 MiB. The smallest CUDA context that was measured holds 518 MiB."""

LEFTOVERS = frozenset({State.DEAD, State.ZOMBIE, State.STUCK, State.ORPHANED})


@dataclass(frozen=True, slots=True)
class CheckTolerance:
    """What a clean device may have: live processes of ``owners`` (names or ``TYPE:NAME``) are allowed."""

    leftover: int = MAX_LEFTOVER
    live: bool = False
    owners: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CheckReason:
    """One finding against a device; without ``counts`` it is only a remark."""

    kind: str
    text: str
    counts: bool = True
    pid: int | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result for one device; ``searched``: we looked for hidden holders in every process."""

    gpu: str
    uuid: str
    status: int
    reasons: tuple[CheckReason, ...] = ()
    searched: bool = False

    @property
    def line(self) -> str:
        """The result as one line."""
        word = {CLEAN: "clean", NOT_CLEAN: "NOT CLEAN", CANNOT_TELL: "cannot tell"}[self.status]
        parts = [reason.text for reason in sorted(self.reasons, key=lambda each: not each.counts)]
        if self.status == CLEAN and not self.searched and "unreadable" not in {r.kind for r in self.reasons}:
            parts.append("hidden holders not searched for")
        where = f"GPU {self.gpu} {self.uuid}".rstrip()
        return printable(f"{where}: {word}" + (f": {'; '.join(parts)}" if parts else ""))


def owner_matches(wanted: Collection[str], owner: Key) -> bool:
    """Tell whether one of ``NAME`` or ``TYPE:NAME`` means this owner."""
    return owner[1] in wanted or f"{owner[0]}:{owner[1]}" in wanted


def describe_process(facts: ProcessFacts | None) -> str:
    """Write program and owner of a process."""
    kind, name = owner_of(facts) or UNKNOWN
    command = (facts.command if facts is not None else "") or "unknown program"
    return f"{command} of {kind} {name}".rstrip()


def check_devices(
    snapshot: Snapshot, wanted: Collection[str], tolerance: CheckTolerance, *, unreadable: int = 0
) -> list[CheckResult]:
    """Check the wanted devices, by index or UUID, or all of them if none is named.

    ``unreadable`` is the number of processes that the search for hidden holders could not look into. A MIG
    instance has the index of its GPU; the divided GPU itself has no memory to judge.
    """
    if not snapshot.up:
        reason, message = snapshot.failure or ("starting", "no sample has finished yet")
        reasons = (CheckReason(reason, message),)
        return [CheckResult(each, "", CANNOT_TELL, reasons) for each in sorted(wanted) or ["all"]]
    devices = [device for device in snapshot.devices if not wanted or not set(device.key).isdisjoint(wanted)]
    known = {label for device in devices for label in device.key}
    missing = (CheckReason("missing", "the driver lists no such GPU"),)
    results = [_device(device, snapshot, tolerance) for device in devices if not device.reading.divided]
    if unreadable:
        note = CheckReason(
            "unreadable",
            f"{unreadable} process(es) that could not be searched for hidden holders",
            counts=False,
        )
        results = [
            replace(each, searched=False, reasons=(*each.reasons, note)) if each.searched else each
            for each in results
        ]
    return results + [CheckResult(each, "", CANNOT_TELL, missing) for each in sorted(set(wanted) - known)]


def overall_status(results: Iterable[CheckResult]) -> int:
    """Return the exit status for all devices: what is certain comes first."""
    found = {result.status for result in results}
    return next((status for status in (NOT_CLEAN, CANNOT_TELL) if status in found), CLEAN)


def _device(device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance) -> CheckResult:
    gpu, uuid = device.key
    unknowns = tuple(_unknowns(device, snapshot))
    if unknowns:
        return CheckResult(gpu, uuid, CANNOT_TELL, unknowns)
    reasons = (
        *_leftovers(device, snapshot, tolerance),
        *_live(device, snapshot, tolerance),
        *_hidden(device, tolerance),
        *_reservations(device),
    )
    status = NOT_CLEAN if any(reason.counts for reason in reasons) else CLEAN
    return CheckResult(gpu, uuid, status, reasons, device.hidden is not None)


def _unknowns(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[CheckReason]:
    if not device.up:
        yield CheckReason("no-data", f"no data: {device.reading.error}")
    elif snapshot.host_pid_namespace is not True:
        text = "not in the host's PID namespace; NVML lists holders only there; see 'vramledger doctor'"
        yield CheckReason("blind", text)
    elif device.ledger is None or device.reading.processes is None:
        yield CheckReason("no-book", "the driver does not report enough for a ledger")


def _leftovers(
    device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance
) -> Iterator[CheckReason]:
    """Name what is left over; it counts if all of it together exceeds the tolerance."""
    holdings = [each for each in device.holdings if each.state in LEFTOVERS]
    unattributed = 0
    if device.ledger is not None and device.ledger.driver_reserved is not None:
        unattributed = device.ledger.unattributed
    exceeded = sum(each.memory or 0 for each in holdings) + unattributed > tolerance.leftover
    for each in holdings:
        # A size that NVML does not report may be large.
        why = each.why + (", without a reservation" if _unreserved(device, each) else "")
        yield _reason(each, snapshot, why, counts=exceeded or each.memory is None)
    if device.ledger is not None and device.ledger.driver_reserved is None:
        text = "this driver does not report its own reserve, so unattributed memory is not judged"
        yield CheckReason("no-reserve", text, counts=False)
    elif unattributed and exceeded:
        yield CheckReason(
            "unattributed", f"{gib(unattributed)} unattributed", counts=True, memory=unattributed
        )


def _live(device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance) -> Iterator[CheckReason]:
    for each in device.holdings:
        if each.state in LEFTOVERS:
            continue
        facts = snapshot.facts_of(each.pid)
        ours = owner_matches(tolerance.owners, owner_of(facts) or UNKNOWN)
        server = facts is not None and facts.command == MPS_SERVER and facts.uid == 0
        harmless = server and each.memory is not None and each.memory <= tolerance.leftover
        why = "without a reservation" if _unreserved(device, each) else ""
        yield _reason(each, snapshot, why, counts=not (tolerance.live or ours or harmless))


def _unreserved(device: DeviceSnapshot, holding: Holding) -> bool:
    """Tell whether a scheduler assigns the device, and certainly not to this holder's owner."""
    return device.reservation_status is not None and holding.pid in (
        device.reservation_status.unreserved_pids or ()
    )


def _reservations(device: DeviceSnapshot) -> Iterator[CheckReason]:
    """Name owners that have a reservation but hold nothing, and how many owners share.

    Neither counts against the device.
    """
    for each in device.reservation_status.reservations if device.reservation_status is not None else ():
        if each.held is False:
            yield CheckReason(
                "reserved", f"reserved for {each.type} {each.name}, which holds nothing", counts=False
            )
    if device.owner_usage is not None and device.owner_usage.holding > 1:
        yield CheckReason("shared", f"held by {device.owner_usage.holding} owners", counts=False)


def _hidden(device: DeviceSnapshot, tolerance: CheckTolerance) -> Iterator[CheckReason]:
    for each in device.hidden or ():
        ours = each.user is not None and owner_matches(tolerance.owners, ("user", each.user))
        counts = each.kind == "cuda" and not (tolerance.live or ours)
        yield CheckReason("hidden", _hidden_text(each), counts=counts, pid=each.pid)


def _hidden_text(holder: HiddenHolder) -> str:
    how = "CUDA loaded" if holder.kind == "cuda" else "the device file open"
    return f"hidden pid {holder.pid} {holder.command} of user {holder.user or '?'} has {how}"


def _reason(holding: Holding, snapshot: Snapshot, why: str, *, counts: bool) -> CheckReason:
    about = describe_process(snapshot.facts_of(holding.pid))
    size = "unknown size" if holding.memory is None else gib(holding.memory)
    text = f"{holding.state.value} pid {holding.pid} {about} holds {size}" + (f" ({why})" if why else "")
    return CheckReason(holding.state.value, text, counts, holding.pid, holding.memory)


def results_json(results: Iterable[CheckResult]) -> dict[str, Json]:
    """Return the results as JSON values."""
    results = list(results)
    words = {CLEAN: "clean", NOT_CLEAN: "not-clean", CANNOT_TELL: "cannot-tell"}
    status = overall_status(results)
    return {
        "version": 1,
        "verdict": words[status],
        "exit_status": status,
        "devices": [
            {
                "gpu": result.gpu,
                "uuid": result.uuid,
                "verdict": words[result.status],
                "searched_hidden": result.searched,
                "reasons": [
                    {
                        "kind": reason.kind,
                        "counts": reason.counts,
                        "pid": reason.pid,
                        "memory": reason.memory,
                        "said": reason.text,
                    }
                    for reason in result.reasons
                ],
            }
            for result in results
        ],
    }
