"""Is a device clean for the next job: what is left over, who is still there, what cannot be told.

Pure: snapshots in, verdicts out. For the prolog and epilog of a scheduler, node checks and CI.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from vramledger.accounting.owner_usage import UNKNOWN, Key, owner_of
from vramledger.accounting.reservations import MPS_SERVER
from vramledger.model.reading import HiddenHolder, ProcessFacts
from vramledger.model.snapshot import DeviceSnapshot, Holding, Snapshot, State
from vramledger.printable import printable
from vramledger.views.ledger_json import Json
from vramledger.views.table import gib

CLEAN, NOT_CLEAN, CANNOT_TELL = 0, 1, 3
"""Exit statuses; 2 is a wrong flag."""

MAX_LEFTOVER = 128 * 2**20
"""Bytes that count as nothing: ``unattributed`` moved between 0 and 66 MiB on a healthy H200, and the MPS
server holds 66 MiB; the smallest CUDA context that was measured holds 518."""

LEFTOVERS = frozenset({State.DEAD, State.ZOMBIE, State.ORPHANED})


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What a clean device may have: ``owners`` are names or ``TYPE:NAME`` whose live processes are ours."""

    leftover: int = MAX_LEFTOVER
    live: bool = False
    owners: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that speaks against a device, or is only worth a note when it does not ``count``."""

    kind: str
    said: str
    count: bool = True
    pid: int | None = None
    memory: int | None = None


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What is said of one device; ``searched``: hidden holders were looked for in every process."""

    gpu: str
    uuid: str
    status: int
    reasons: tuple[Reason, ...] = ()
    searched: bool = False

    @property
    def line(self) -> str:
        """The verdict as one line."""
        word = {CLEAN: "clean", NOT_CLEAN: "NOT CLEAN", CANNOT_TELL: "cannot tell"}[self.status]
        said = [reason.said for reason in sorted(self.reasons, key=lambda each: not each.count)]
        if self.status == CLEAN and not self.searched and "unreadable" not in {r.kind for r in self.reasons}:
            said.append("hidden holders not searched for")
        where = f"GPU {self.gpu} {self.uuid}".rstrip()
        return printable(f"{where}: {word}" + (f": {'; '.join(said)}" if said else ""))


def matches_owner(wanted: Collection[str], owner: Key) -> bool:
    """Tell whether an owner is meant by one of ``NAME`` or ``TYPE:NAME``."""
    return owner[1] in wanted or f"{owner[0]}:{owner[1]}" in wanted


def facts_of(snapshot: Snapshot, pid: int) -> ProcessFacts | None:
    """Return what is known of a holder."""
    process = snapshot.processes.get(pid)
    return process.facts if process is not None else None


def describe(facts: ProcessFacts | None) -> str:
    """Write program and owner of a process."""
    kind, name = owner_of(facts) or UNKNOWN
    command = (facts.command if facts is not None else "") or "unknown program"
    return f"{command} of {kind} {name}".rstrip()


def check_devices(
    snapshot: Snapshot, wanted: Collection[str], tolerance: Tolerance, *, unreadable: int = 0
) -> list[CheckResult]:
    """Judge the wanted devices, by index or UUID, or all of them when none is named.

    ``unreadable`` processes could not be looked into by the search for hidden holders. A MIG instance
    goes with the index of its GPU; the divided GPU has no memory to be judged itself.
    """
    if not snapshot.up:
        reason, message = snapshot.failure or ("starting", "no sample has finished yet")
        said = (Reason(reason, message),)
        return [CheckResult(each, "", CANNOT_TELL, said) for each in sorted(wanted) or ["all"]]
    devices = [device for device in snapshot.devices if not wanted or not set(device.key).isdisjoint(wanted)]
    known = {label for device in devices for label in device.key}
    missing = (Reason("missing", "the driver lists no such GPU"),)
    verdicts = [_device(device, snapshot, tolerance) for device in devices if not device.reading.divided]
    if unreadable:
        note = Reason(
            "unreadable", f"{unreadable} process(es) not to be searched for hidden holders", count=False
        )
        verdicts = [
            replace(each, searched=False, reasons=(*each.reasons, note)) if each.searched else each
            for each in verdicts
        ]
    return verdicts + [CheckResult(each, "", CANNOT_TELL, missing) for each in sorted(set(wanted) - known)]


def overall(verdicts: Iterable[CheckResult]) -> int:
    """Return the exit status for all devices: what is certain first."""
    found = {verdict.status for verdict in verdicts}
    return next((status for status in (NOT_CLEAN, CANNOT_TELL) if status in found), CLEAN)


def _device(device: DeviceSnapshot, snapshot: Snapshot, tolerance: Tolerance) -> CheckResult:
    gpu, uuid = device.key
    blind = tuple(_unseen(device, snapshot))
    if blind:
        return CheckResult(gpu, uuid, CANNOT_TELL, blind)
    reasons = (
        *_leftovers(device, snapshot, tolerance),
        *_live(device, snapshot, tolerance),
        *_hidden(device, tolerance),
        *_reserved(device),
    )
    status = NOT_CLEAN if any(reason.count for reason in reasons) else CLEAN
    return CheckResult(gpu, uuid, status, reasons, device.hidden is not None)


def _unseen(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[Reason]:
    if not device.up:
        yield Reason("no-data", f"no data: {device.reading.error}")
    elif snapshot.host_pid_namespace is not True:
        said = "not in the host's PID namespace, where alone NVML lists holders; see 'vramledger doctor'"
        yield Reason("blind", said)
    elif device.book is None or device.reading.processes is None:
        yield Reason("no-book", "the driver does not tell enough for a ledger")


def _leftovers(device: DeviceSnapshot, snapshot: Snapshot, tolerance: Tolerance) -> Iterator[Reason]:
    """Name what is left over; it counts when all of it together exceeds the tolerance."""
    holdings = [each for each in device.holdings if each.state in LEFTOVERS]
    loose = 0
    if device.book is not None and device.book.reserved is not None:
        loose = device.book.unattributed
    much = sum(each.memory or 0 for each in holdings) + loose > tolerance.leftover
    for each in holdings:
        # A size that NVML does not say is no small size.
        why = each.why + (", without a reservation" if _unreserved(device, each) else "")
        yield _reason(each, snapshot, why, count=much or each.memory is None)
    if device.book is not None and device.book.reserved is None:
        said = "this driver does not tell its own reserve from unattributed memory, which is not judged"
        yield Reason("no-reserve", said, count=False)
    elif loose and much:
        yield Reason("unattributed", f"{gib(loose)} unattributed", count=True, memory=loose)


def _live(device: DeviceSnapshot, snapshot: Snapshot, tolerance: Tolerance) -> Iterator[Reason]:
    for each in device.holdings:
        if each.state in LEFTOVERS:
            continue
        facts = facts_of(snapshot, each.pid)
        ours = matches_owner(tolerance.owners, owner_of(facts) or UNKNOWN)
        server = facts is not None and facts.command == MPS_SERVER and facts.uid == 0
        harmless = server and each.memory is not None and each.memory <= tolerance.leftover
        why = "without a reservation" if _unreserved(device, each) else ""
        yield _reason(each, snapshot, why, count=not (tolerance.live or ours or harmless))


def _unreserved(device: DeviceSnapshot, holding: Holding) -> bool:
    """Tell whether a scheduler gives the device away, and certainly not to this holder's owner."""
    return device.standing is not None and holding.pid in (device.standing.unreserved or ())


def _reserved(device: DeviceSnapshot) -> Iterator[Reason]:
    """Name who has a reservation and holds nothing, and how many owners share; no fault of the device."""
    for each in device.standing.reserved if device.standing is not None else ():
        if each.held is False:
            yield Reason(
                "reserved", f"reserved for {each.type} {each.name}, which holds nothing", count=False
            )
    if device.owners is not None and device.owners.holding > 1:
        yield Reason("shared", f"held by {device.owners.holding} owners", count=False)


def _hidden(device: DeviceSnapshot, tolerance: Tolerance) -> Iterator[Reason]:
    for each in device.hidden or ():
        ours = each.user is not None and matches_owner(tolerance.owners, ("user", each.user))
        counts = each.kind == "cuda" and not (tolerance.live or ours)
        yield Reason("hidden", _hidden_said(each), count=counts, pid=each.pid)


def _hidden_said(holder: HiddenHolder) -> str:
    how = "CUDA loaded" if holder.kind == "cuda" else "the device file open"
    return f"hidden pid {holder.pid} {holder.command} of user {holder.user or '?'} has {how}"


def _reason(holding: Holding, snapshot: Snapshot, why: str, *, count: bool) -> Reason:
    about = describe(facts_of(snapshot, holding.pid))
    size = "unknown size" if holding.memory is None else gib(holding.memory)
    said = f"{holding.state.value} pid {holding.pid} {about} holds {size}" + (f" ({why})" if why else "")
    return Reason(holding.state.value, said, count, holding.pid, holding.memory)


def document(verdicts: Iterable[CheckResult]) -> dict[str, Json]:
    """Return the verdicts as JSON values."""
    verdicts = list(verdicts)
    words = {CLEAN: "clean", NOT_CLEAN: "not-clean", CANNOT_TELL: "cannot-tell"}
    status = overall(verdicts)
    return {
        "version": 1,
        "verdict": words[status],
        "exit_status": status,
        "devices": [
            {
                "gpu": verdict.gpu,
                "uuid": verdict.uuid,
                "verdict": words[verdict.status],
                "searched_hidden": verdict.searched,
                "reasons": [
                    {
                        "kind": reason.kind,
                        "counts": reason.count,
                        "pid": reason.pid,
                        "memory": reason.memory,
                        "said": reason.said,
                    }
                    for reason in verdict.reasons
                ],
            }
            for verdict in verdicts
        ],
    }
