"""The expected result of a recording: the manifest, the replay, the promises, the golden scrape."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vramledger.accounting.tracker import HoldingTracker
from vramledger.config import COLLECTORS
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.snapshot import Ledger, Snapshot
from vramledger.sampling.replay import read_recording

HOME = Path(__file__).parents[1] / "recordings"
MIB = 2**20


@dataclass(frozen=True)
class Entry:
    """One recording and its expected verdict, as the manifest says it; what is None is not looked at."""

    name: str  # of the situation; the golden scrape is ``NAME.metrics``
    file: str  # name of the recording beside the manifest
    note: str = ""  # the situation in a sentence
    idle_after: float = 600.0  # seconds, as for the exporter
    interval: float = 0.5  # seconds between two samples
    expected: dict[int, str] = field(default_factory=dict)  # state of every pid in the last reading
    roles: dict[int, str] = field(default_factory=dict)  # what the pids were in the play
    policies: dict[int, str] = field(default_factory=dict)  # of some pids, as ``jax/growth/environ``
    devices: dict[int, list[int]] = field(default_factory=dict)  # indices, where it matters on which
    absent: list[int] = field(default_factory=list)  # pids that held memory earlier and must no longer
    passed: list[tuple[int, str]] = field(default_factory=list)  # (pid, state) of some earlier reading
    hidden: list[int] | None = None  # pids of the hidden holders in the last reading
    host_pid_namespace: bool | None = None  # what the readings must say
    unattributed_below: float | None = 0.01  # most of unattributed / total; None where no bound holds
    unattributed_between: list[int] | None = None  # bytes on device 0 in the last reading, where they are
    uncharged: dict[int, int] = field(default_factory=dict)  # uncharged bytes on device 0 by their pid
    settling: int = 0  # readings above the bound, while a process came or went
    gpu: str = ""  # product name and driver version


def load() -> list[Entry]:
    entries = []
    for raw in json.loads((HOME / "manifest.json").read_text()):
        for key in ("expected", "roles", "policies", "devices", "uncharged"):
            raw[key] = {int(pid): value for pid, value in raw.get(key, {}).items()}
        raw["passed"] = [(int(pid), state) for pid, state in raw.get("passed", [])]
        entries.append(Entry(**raw))
    return entries


def replay(directory: Path, entry: Entry) -> list[Snapshot]:
    """Return the snapshots of a recording, from its first reading to its last."""
    judge = HoldingTracker(
        idle_after=entry.idle_after, interval=entry.interval, source="replay", recording=entry.file
    )
    return [judge.update(reading) for reading in read_recording(directory / entry.file)]


def states(snapshot: Snapshot) -> dict[int, str]:
    """Return the state of every listed pid; several, joined, if devices differ."""
    seen: dict[int, set[str]] = {}
    for device in snapshot.devices:
        for holding in device.holdings:
            seen.setdefault(holding.pid, set()).add(holding.state.value)
    return {pid: "/".join(sorted(found)) for pid, found in seen.items()}


def policies(snapshot: Snapshot) -> dict[int, str]:
    """Return framework, policy and source of every holder that /proc shows."""
    return {pid: "/".join(process.policy[:3]) for pid, process in snapshot.processes.items()}


def hidden(snapshot: Snapshot) -> list[int] | None:
    """Return the pids of the hidden holders, None before the first search has ended."""
    if any(device.hidden is None for device in snapshot.devices):
        return None
    return sorted({holder.pid for device in snapshot.devices for holder in device.hidden or ()})


def above(entry: Entry, snapshots: Sequence[Snapshot]) -> list[int]:
    """Return the serial numbers of the snapshots whose unattributed bytes exceed the bound."""
    bound = entry.unattributed_below

    def exceeds(ledger: Ledger | None) -> bool:
        return ledger is not None and bound is not None and ledger.unattributed > bound * ledger.total

    return [each.serial for each in snapshots if any(exceeds(device.ledger) for device in each.devices)]


def imbalances(snapshots: Iterable[Snapshot]) -> list[str]:
    """Return every ledger that does not balance; a device that answered must have a ledger."""
    found = []
    for snapshot in snapshots:
        for device in snapshot.devices:
            ledger = device.ledger
            if device.reading.divided:
                continue  # its instances have the memory
            if ledger is None:
                found.append(f"reading {snapshot.serial}: GPU {device.reading.index} has no book")
                continue
            others = (ledger.driver_reserved or 0, ledger.operating_system or 0, ledger.unattributed)
            parts = [ledger.free, *others, *ledger.states.values()]
            if sum(parts) != ledger.total or min(parts) < 0:
                found.append(
                    f"reading {snapshot.serial}: GPU {device.reading.index} does not balance: {ledger}"
                )
    return found


def problems(entry: Entry, snapshots: Sequence[Snapshot]) -> list[str]:  # noqa: C901 a promise each
    """Return the promises of an entry that its replay does not keep."""
    if not snapshots:
        return ["the recording is empty"]
    found = [f"reading {each.serial}: {each.failure}" for each in snapshots if not each.up]
    found += imbalances(snapshots)
    last = snapshots[-1]
    if states(last) != entry.expected:
        found.append(f"states {states(last)}, expected {entry.expected}")
    ever = {(pid, state) for each in snapshots for pid, state in states(each).items()}
    listed = {pid for pid, _ in ever}
    found += [f"pid {pid} is still listed" for pid in entry.absent if pid in states(last)]
    found += [f"pid {pid} was never listed" for pid in entry.absent if pid not in listed]
    found += [f"pid {pid} was never {state}" for pid, state in entry.passed if (pid, state) not in ever]
    judged = policies(last)
    found += [
        f"pid {pid} ({entry.roles.get(pid, '?')}) is judged {judged.get(pid)}, expected {policy}"
        for pid, policy in entry.policies.items()
        if judged.get(pid) != policy
    ]
    for pid, indices in entry.devices.items():
        on = [each.reading.index for each in last.devices if any(held.pid == pid for held in each.holdings)]
        if on != indices:
            found.append(f"pid {pid} holds memory on devices {on}, expected {indices}")
    if entry.hidden is not None and hidden(last) != sorted(entry.hidden):
        found.append(f"hidden holders {hidden(last)}, expected {entry.hidden}")
    if entry.host_pid_namespace is not None and last.host_pid_namespace is not entry.host_pid_namespace:
        found.append(f"host_pid_namespace {last.host_pid_namespace}, expected {entry.host_pid_namespace}")
    excess = above(entry, snapshots)
    if last.serial in excess:
        found.append(f"unattributed exceeds {entry.unattributed_below} of the total at the end")
    if len(excess) > entry.settling:
        found.append(f"unattributed exceeds the bound in readings {excess}, expected {entry.settling}")
    if entry.unattributed_between is not None:
        low, high = entry.unattributed_between
        ledger = last.devices[0].ledger
        if ledger is None or not low <= ledger.unattributed <= high:
            found.append(f"unattributed on device 0 not within {low} to {high}: {ledger}")
    return found + (uncharged_problems(entry, last) if entry.uncharged else [])


def uncharged_problems(entry: Entry, last: Snapshot) -> list[str]:
    """Return where a holder gets bytes that it does not have, or its range excludes those that it has."""
    found = []
    for holding in last.devices[0].holdings:
        have, given = entry.uncharged.get(holding.pid, 0), holding.uncharged
        least, most = (0, 0) if given is None else (given.least, given.most)
        slack = 32 * MIB + have // 50
        if not least <= have + slack or not most >= have - slack:
            who = f"pid {holding.pid} ({entry.roles.get(holding.pid, '?')})"
            given_mib = f"{least // MIB} to {most // MIB}"
            found.append(f"{who} has {have // MIB} MiB uncharged, and gets {given_mib}")
    ledger = last.devices[0].ledger
    if ledger is None or ledger.unattributed > max(ledger.used // 100, 128 * MIB):
        found.append(f"unattributed is more than 1 % of the used bytes: {ledger}")
    return found


def golden(snapshot: Snapshot) -> bytes:
    """Return the scrape of a snapshot, without the exporter's own version and process."""
    exposition = Exposition(100, lambda: None, clock=lambda: 0.0)
    page = exposition.render(snapshot, ScrapeRequest(frozenset(COLLECTORS) - {"exporter"}))
    lines = page.splitlines(keepends=True)
    return b"".join(line for line in lines if b"vramledger_build_info" not in line)


def golden_path(directory: Path, entry: Entry) -> Path:
    return directory / f"{entry.name}.metrics"
