"""Tell whether a device is clean for the next job: what is left over, which holders live, what is unknown.

Pure: snapshots in, results out. It is for the prolog and epilog of a scheduler, node checks and CI. For a
node on which jobs run, :func:`find_leftovers` says only what no running job accounts for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from vramledger.accounting.owners.owner_usage import UNKNOWN, Key, owner_of
from vramledger.accounting.owners.reservations import is_roots_mps_server, mps_user
from vramledger.model.public_ledger import DeviceLeftovers, LeftoverReason, Leftovers, Verdict
from vramledger.model.reading import ASLEEP, ProcessFacts
from vramledger.model.snapshot import LEFTOVERS, DeviceSnapshot, Holding, Snapshot, State
from vramledger.verdicts.remedies import left_text, why_unusable, words_of_error
from vramledger_agent.printable import gib, printable

CLEAN, NOT_CLEAN, CANNOT_TELL = 0, 1, 3
"""Exit statuses; 2 is a wrong flag."""

MAX_LEFTOVER = 128 * 2**20
"""The bytes that do not count: ``unattributed`` moved between 0 and 66 MiB on a healthy H200, and the MPS
server holds 66 MiB. The smallest CUDA context that was measured holds 518 MiB."""

NO_SUCH_GPU = "the driver lists no such GPU"

_SMALL = 2**30 // 100
"""Below this, bytes in GiB would be shown as 0.00."""


class CheckTolerance(Struct, frozen=True):
    """What a clean device may have: live processes of ``owners`` (names or ``TYPE:NAME``) are allowed."""

    leftover: int = MAX_LEFTOVER
    live: bool = False
    owners: frozenset[str] = frozenset()


class SearchExtent(NamedTuple):
    """How far a search for hidden holders got: whether it ended, and how many processes it could not read."""

    complete: bool
    unreadable: int


class CheckReason(Struct, frozen=True):
    """One finding about a device, which is then not clean if it ``counts``.

    With ``doubt`` it says what is not known, and the device is not called clean either. ``start`` is when
    process ``pid`` started, in ticks since boot.
    """

    kind: str
    text: str
    counts: bool = True
    pid: int | None = None
    memory: int | None = None
    doubt: bool = False
    start: int | None = None


class CheckResult(Struct, frozen=True):
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
        parts = [reason.text for reason in sorted(self.reasons, key=lambda r: (not r.counts, not r.doubt))]
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


def amount(memory: int | None) -> str:
    """Write a number of bytes for a sentence; NVML does not report it for every process."""
    if memory is None:
        return "an unknown amount"
    return gib(memory) if memory >= _SMALL else f"{memory / 2**20:.0f} MiB"


def device_matches(wanted: Collection[str], device: DeviceSnapshot) -> bool:
    """Tell whether one of these names means this device; a GPU is each of its MIG instances, too."""
    names = {*device.key, device.reading.parent}
    if device.reading.minor is not None:
        names.add(f"/dev/nvidia{device.reading.minor}")
    return not names.isdisjoint(wanted)


def unknown_devices(snapshot: Snapshot, wanted: Collection[str]) -> list[str]:
    """Return the names that mean no device of the driver."""
    return sorted(
        name for name in set(wanted) if not any(device_matches({name}, each) for each in snapshot.devices)
    )


def check_devices(
    snapshot: Snapshot,
    wanted: Collection[str],
    tolerance: CheckTolerance,
    *,
    search: SearchExtent | None = None,
) -> list[CheckResult]:
    """Check the wanted devices, as :func:`device_matches` knows them, or all of them if none is named.

    Without a ``search`` the results say nothing of hidden holders. Of a GPU in MIG mode instances are
    checked.
    """
    if not snapshot.up:
        reason, message = snapshot.failure or ("starting", "no sample has finished yet")
        reasons = (CheckReason(reason, message),)
        return [CheckResult(each, "", CANNOT_TELL, reasons) for each in sorted(wanted) or ["all"]]
    divided = {each.reading.parent for each in snapshot.devices}
    results = [
        _device(device, snapshot, tolerance, search)
        for device in snapshot.devices
        if (not wanted or device_matches(wanted, device))
        and (device.key[1] not in divided or next(unseen_holders(device), None) is not None)
    ]
    missing = (CheckReason("missing", NO_SUCH_GPU),)
    return results + [
        CheckResult(each, "", CANNOT_TELL, missing) for each in unknown_devices(snapshot, wanted)
    ]


def find_leftovers(snapshot: Snapshot, leftover: int = MAX_LEFTOVER) -> list[CheckResult]:
    """Say for each device what is left over from work that has ended, while other work goes on.

    Live processes do not count. Neither does what is inside a pod or a batch job that may still have the
    device: the scheduler gives the device to nobody else before that owner has ended. To know less of owners
    and reservations never makes a harsher result. A recording says nothing about this host.
    """
    if snapshot.source != "nvml":
        reasons = (CheckReason("replay", "the exporter plays a recording, not this host's GPUs"),)
        return [CheckResult("all", "", CANNOT_TELL, reasons)]
    devices = tuple(_with_running_owners(each, snapshot) for each in snapshot.devices)
    return check_devices(replace(snapshot, devices=devices), (), CheckTolerance(leftover, live=True))


def _with_running_owners(device: DeviceSnapshot, snapshot: Snapshot) -> DeviceSnapshot:
    """Return a device on which owners that may still have it count as live, its uncharged bytes too."""
    own = {each.pid for each in device.holdings if each.left_over and _owner_may_have(device, each, snapshot)}
    if not own:
        return device
    holdings = tuple(
        replace(each, state=State.ACTIVE, why=f"{each.why}; its {_scheduled(snapshot, each)} is still there")
        if each.pid in own
        else each
        for each in device.holdings
    )
    undivided = device.undivided
    if undivided is not None and not own.isdisjoint(undivided.pids):
        undivided = None
    ledger = None if device.ledger is None else replace(device.ledger, unattributed=0)
    return replace(device, holdings=holdings, undivided=undivided, ledger=ledger)


def _owner_may_have(device: DeviceSnapshot, holding: Holding, snapshot: Snapshot) -> bool:
    """Tell whether a pod or a batch job that has not certainly ended may still have a device."""
    if not _scheduled(snapshot, holding) or holding.pid in snapshot.unowned:
        return False
    return not _unreserved(device, holding)


def _scheduled(snapshot: Snapshot, holding: Holding) -> str:
    """Return what kind of owner a scheduler has given a holder, empty if none that is known."""
    facts = snapshot.facts_of(holding.pid)
    owner = facts.owner if facts is not None else None
    if owner is None:
        return ""
    return "job" if owner.slurm_job else "pod" if owner.pod else ""


def overall_status(results: Iterable[CheckResult]) -> int:
    """Return the exit status for all devices: what is certain first, not known without a result."""
    found = {result.status for result in results} or {CANNOT_TELL}
    return next((status for status in (NOT_CLEAN, CANNOT_TELL) if status in found), CLEAN)


def unseen_holders(device: DeviceSnapshot) -> Iterator[CheckReason]:
    """Say why the holders of a device are not all known, apart from our own PID namespace."""
    reading = device.reading
    if not device.up:
        yield CheckReason("asleep" if reading.error == ASLEEP else "no-data", words_of_error(reading))
    elif "mig" in reading.failed:
        yield CheckReason("mig", "the driver did not say into which instances MIG divides it")
    elif not reading.divided and reading.processes is None:
        yield CheckReason("no-list", "the driver does not list its processes")


def _device(
    device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance, search: SearchExtent | None
) -> CheckResult:
    gpu, uuid = device.key
    unusable = tuple(_unusable(device, snapshot))
    unknowns = tuple(_unknowns(device, snapshot))
    if unknowns:
        return CheckResult(gpu, uuid, NOT_CLEAN if unusable else CANNOT_TELL, (*unusable, *unknowns))
    reasons = (
        *unusable,
        *_leftovers(device, snapshot, tolerance),
        *_live(device, snapshot, tolerance),
        *_hidden(device, tolerance),
        *_unsearched(device, tolerance, search),
        *_reservations(device),
    )
    status = CLEAN
    if any(reason.counts for reason in reasons):
        status = NOT_CLEAN
    elif any(reason.doubt for reason in reasons):
        status = CANNOT_TELL
    searched = search is not None and search == (True, 0) and device.hidden is not None
    return CheckResult(gpu, uuid, status, reasons, searched)


def _unusable(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[CheckReason]:
    """Say what the driver says against using a device; of an instance, also of the GPU that it is part of."""
    parts = {device.reading.uuid, device.reading.parent}
    for each in snapshot.devices:
        if each.reading.uuid in parts and (why := why_unusable(each.reading)) is not None:
            yield CheckReason("unusable", str(why))


def _unknowns(device: DeviceSnapshot, snapshot: Snapshot) -> Iterator[CheckReason]:
    if (unseen := next(unseen_holders(device), None)) is not None:
        yield unseen
    elif snapshot.host_pid_namespace is not True:
        text = "not in the host's PID namespace; NVML lists holders only there; see 'vramledger doctor'"
        yield CheckReason("blind", text)
    elif device.ledger is None and not device.reading.divided:
        yield CheckReason("no-book", "the driver does not report enough for a ledger")
    elif device.reading.divided:
        yield CheckReason("no-instances", "MIG is on, and no instance exists: no job can use it")


def _unsearched(
    device: DeviceSnapshot, tolerance: CheckTolerance, search: SearchExtent | None
) -> Iterator[CheckReason]:
    """Say where a hidden holder may be; where live processes may be, so may hidden ones (no ``doubt``)."""
    text = ""
    if search is None:
        return
    if not search.complete:
        text = "the search for hidden holders took too long and was cut short"
    elif search.unreadable:
        text = f"{search.unreadable} process(es) could not be searched for hidden holders; run this as root"
    elif device.hidden is None:
        text = "its device file is not known, so no hidden holder can be found"
    if text:
        kind = "unreadable" if search.complete and search.unreadable else "unsearched"
        yield CheckReason(kind, text, counts=False, doubt=not tolerance.live)


def _leftovers(
    device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance
) -> Iterator[CheckReason]:
    """Name what is left over; it counts if all of it together exceeds the tolerance."""
    holdings = [each for each in device.holdings if each.left_over]
    unattributed = 0
    if device.ledger is not None and device.ledger.driver_reserved is not None:
        unattributed = device.ledger.unattributed
    left = sum(each.held or 0 for each in holdings)
    if device.undivided is not None and device.undivided.state in LEFTOVERS:
        left += device.undivided.bytes  # every program that can have it is a leftover
    exceeded = left + unattributed > tolerance.leftover
    for each in holdings:
        # A size that NVML does not report may be large.
        why = each.why + (", without a reservation" if _unreserved(device, each) else "")
        yield _reason(each, snapshot, why, counts=exceeded or each.memory is None)
    ledger = device.ledger
    if ledger is not None and ledger.driver_reserved is None and device.reading.memory_kind is None:
        text = "this driver does not report its own reserve, so unattributed memory is not judged"
        yield CheckReason("no-reserve", text, counts=False)
    elif unattributed and exceeded:
        text = "; ".join([f"{gib(unattributed)} unattributed", *(left_text(each) for each in device.left)])
        yield CheckReason("unattributed", text, counts=True, memory=unattributed)


def _live(device: DeviceSnapshot, snapshot: Snapshot, tolerance: CheckTolerance) -> Iterator[CheckReason]:
    for each in device.holdings:
        if each.left_over:
            continue
        facts = snapshot.facts_of(each.pid)
        ours = owner_matches(tolerance.owners, owner_of(facts) or UNKNOWN)
        server = is_roots_mps_server(facts)
        if (mps := mps_user(facts)) is not None:
            ours = ours or owner_matches(tolerance.owners, ("user", mps[1]))
        # A context of graphics alone, such as a display server's: no program that computes is as small.
        display = each.kinds == "G"
        harmless = (server or display) and each.held is not None and each.held <= tolerance.leftover
        why = "without a reservation" if _unreserved(device, each) else ""
        yield _reason(each, snapshot, why, counts=not (tolerance.live or ours or harmless))


def _unreserved(device: DeviceSnapshot, holding: Holding) -> bool:
    """Tell whether a scheduler assigns the device, and certainly not to this holder's owner."""
    return device.reservation_status is not None and holding.pid in (
        device.reservation_status.unreserved_pids or ()
    )


def _reservations(device: DeviceSnapshot) -> Iterator[CheckReason]:
    """Name owners with a reservation that hold nothing, and how many share; neither counts."""
    for each in device.reservation_status.reservations if device.reservation_status is not None else ():
        if each.held is False:
            yield CheckReason(
                "reserved", f"reserved for {each.type} {each.name}, which holds nothing", counts=False
            )
    if device.owner_usage is not None and device.owner_usage.holding > 1:
        yield CheckReason("shared", f"held by {device.owner_usage.holding} owners", counts=False)


def _hidden(device: DeviceSnapshot, tolerance: CheckTolerance) -> Iterator[CheckReason]:
    """Name processes that NVML does not list; the file is the whole GPU's, not an instance's."""
    instance = device.reading.parent is not None
    for each in device.hidden or ():
        ours = each.user is not None and owner_matches(tolerance.owners, ("user", each.user))
        refused = each.kind == "cuda" and not (tolerance.live or ours)
        how = "CUDA loaded" if each.kind == "cuda" else "the device file open"
        text = f"hidden pid {each.pid} {each.command} of user {each.user or '?'} has {how}"
        text += " on this GPU; on which instance is not known" if instance else ""
        yield CheckReason(
            "hidden", text, counts=refused and not instance, pid=each.pid, doubt=refused and instance
        )


def _reason(holding: Holding, snapshot: Snapshot, why: str, *, counts: bool) -> CheckReason:
    about = describe_process(snapshot.facts_of(holding.pid))
    held = amount(holding.held)
    if holding.uncharged is not None and holding.uncharged.least:
        held += f", {amount(holding.uncharged.least)} of it uncharged"
    text = f"{holding.state.value} pid {holding.pid} {about} holds {held}" + (f" ({why})" if why else "")
    return CheckReason(holding.state.value, text, counts, holding.pid, holding.held, start=holding.start)


def leftovers(
    results: Iterable[CheckResult], watched_since: float | None = None, time: float | None = None
) -> Leftovers:
    """Return the results as a public document, times as Unix seconds."""
    results = list(results)
    words: dict[int, Verdict] = {CLEAN: "clean", NOT_CLEAN: "not-clean", CANNOT_TELL: "cannot-tell"}
    status = overall_status(results)
    devices = [
        DeviceLeftovers(
            result.gpu,
            result.uuid,
            words[result.status],
            result.searched,
            [
                LeftoverReason(each.kind, each.counts, each.pid, each.start, each.memory, each.text)
                for each in result.reasons
            ],
        )
        for result in results
    ]
    return Leftovers(1, words[status], status, watched_since, time, devices)
