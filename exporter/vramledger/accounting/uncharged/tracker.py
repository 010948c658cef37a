"""Find the holders of bytes that NVML charges to no process, and never guess one.

Two kinds of memory are in no process' bytes (measured on H100 and H200, driver 580): managed memory, and
memory whose creator has ended while another process still has an exported handle of it. What is known of them
are bounds. A process has no more managed memory than its mappings of ``/dev/nvidia-uvm``; a creator leaves no
more than what was charged to it; together they are what NVML reports as used and charges to nobody.

So each possible holder is a source with a range, and the ranges must add up to these bytes. If a source has
all that the others cannot have, that much is certainly its own. Bytes that were there at our first look may
come from a creator that we never saw, so another holder may have them too. What stays uncertain is published
as a range, and its bytes are undivided: one of the named holders has them.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from vramledger.accounting.agent_figures import AgentJoiner
from vramledger.accounting.holders.matching import HoldingTable
from vramledger.accounting.holders.processes import ProcessTracker
from vramledger.accounting.ledger import balance_device
from vramledger.accounting.sample import Sample
from vramledger.accounting.uncharged import solver
from vramledger.accounting.uncharged.events import (
    PoolMoment,
    PoolState,
    record_calm,
    record_events,
    record_found,
)
from vramledger.accounting.uncharged.solver import Identity, Range, Solution, Sources
from vramledger.model.device_signs import LEAST_BYTES, MIB
from vramledger.model.reading import DeviceReading, HiddenHolder, Reading
from vramledger.model.snapshot import Grade, Holding, Ledger, LeftBytes, UnchargedBytes, UndividedBytes

GIB = 2**30

_PIDS_SHOWN = 5

_CREATOR = re.compile(r"(created by pid \d+ of (?!an unknown user,))(.*?)(, which ended at \d\d:\d\d UTC)")


class LeftEvidence(NamedTuple):
    """Memory of an ended holder that this one can have."""

    range: Range  # how many bytes
    created: str  # :func:`created`
    heirs: Collection[int]  # the pids that can have them
    hidden: int | None  # a process that NVML does not list and that may have them too, None without one
    elsewhere: Collection[int] = ()  # the pids on other GPUs that may have them mapped


class HolderEvidence(NamedTuple):
    """What is known of one holder's uncharged bytes."""

    share: Range  # how many of them it has
    charged: int  # what NVML charges to it
    managed: Range  # how many of them can be managed memory
    bound: int | None  # its mappings of ``/dev/nvidia-uvm``, None when we may not read them
    reported: int | None  # managed memory that its agent reports, None without such a report
    left: Collection[LeftEvidence]  # what ended holders left and this one can have
    rivals: Collection[int]  # the other holders that can have some of the same bytes
    matched: bool  # all mappings on the device are together as large as its uncharged bytes
    late: bool  # some of these bytes came while we did not watch


def describe(known: HolderEvidence) -> UnchargedBytes:
    """Return what a holder has, with the grade and a sentence of the evidence."""
    share, managed = known.share, known.managed
    grade = Grade.SEEN if share.exact and not known.late else Grade.INFERRED
    reasons = []
    if managed.most >= LEAST_BYTES:
        maps = "its mappings, which we may not read"
        if known.bound is not None:
            maps = f"its {_size(known.bound)} of /dev/nvidia-uvm mappings"
        if known.reported and solver.alike(known.reported, known.bound or 0):
            maps += f" and its agent's report of {_size(known.reported)}"
            grade = Grade.PROVEN if share.exact else grade
        verb = "are" if managed.exact else "can be"
        reasons.append(f"{_amount(managed)} {verb} managed memory, from {maps}")
    for left in known.left:
        grade = Grade.INFERRED
        hidden = "" if left.hidden is None else f" or hidden pid {left.hidden}"
        others = f" or {_pids(left.elsewhere)} on another GPU" if left.elsewhere else ""
        holds = "still has them" if len(left.heirs) == 1 else "still have them"
        reasons.append(f"{_amount(left.range)} {left.created}; {_pids(left.heirs)}{others}{hidden} {holds}")
    if not share.exact:
        reasons.append(
            f"{_pids(known.rivals)} can have them too"
            if known.rivals
            else "a process that NVML does not list here can have them too"
        )
    elif known.matched:
        reasons.append("the mappings here are as large as what NVML charges to nobody")
    elif managed.exact:
        reasons.append("nobody else here can have them")
    return UnchargedBytes(
        least=share.least,
        most=share.most,
        managed=min(share.least, managed.most if share.exact else managed.least),
        grade=grade,
        why="; ".join((f"NVML charges {_size(known.charged)}", *reasons)),
    )


def created(pid: int, user: str | None, ended: float) -> str:
    """Say who created memory that is still there, and when its creator ended."""
    when = dt.datetime.fromtimestamp(ended, dt.timezone.utc)
    return f"created by pid {pid} of {user or 'an unknown user'}, which ended at {when:%H:%M} UTC"


def rename_creators(text: str, rename: Callable[[str], str]) -> str:
    """Give each user whom :func:`created` has named in a text another name."""
    return _CREATOR.sub(lambda found: found[1] + rename(found[2]) + found[3], text)


def _pids(pids: Collection[int]) -> str:
    known = sorted(set(pids))
    more = f" and {len(known) - _PIDS_SHOWN} more" if len(known) > _PIDS_SHOWN else ""
    return f"pid {', '.join(map(str, known[:_PIDS_SHOWN]))}{more}"


def _amount(found: Range) -> str:
    if found.exact:
        return _size(found.most)
    return f"{_size(found.least)} to {_size(found.most)}" if found.least else f"up to {_size(found.most)}"


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count // MIB} MiB"


Held = dict[str, tuple[Holding, ...] | None]


class PoolResult(NamedTuple):
    """What was found out about a pool."""

    key: str = ""  # the UUID under which it is counted; empty when nothing is known of it
    # what each holder has uncharged, by (UUID, pid); one that cannot have any is not in it
    held: Mapping[tuple[str, int], UnchargedBytes] = {}
    # the bytes that one of several holders has; None if there are none
    undivided: UndividedBytes | None = None
    left: tuple[LeftBytes, ...] = ()  # what ended holders have left behind
    ledger: Ledger | None = None  # the balance of the pool, if nothing is uncharged there beyond contexts


class UnchargedTracker:
    """Find, in each sample, who has what NVML charges to nobody."""

    def __init__(
        self,
        state: dict[str, PoolState],
        holdings: HoldingTable,
        processes: ProcessTracker,
        agents: AgentJoiner,
    ) -> None:
        self.state = state
        self._holdings = holdings
        self._processes = processes
        self._agents = agents

    def find(
        self,
        devices: Sequence[DeviceReading],
        held: Held,
        sharers: Mapping[str, tuple[str, ...]],
        sample: Sample,
    ) -> dict[str, PoolResult]:
        """Add who has what NVML charges to nobody to ``held``; nothing where NVML lists no process to us."""
        bounds = {(each.pid, each.start): each.bound for each in sample.reading.managed}
        pools = []
        found: dict[str, PoolResult] = {}
        for device in devices:
            group = sharers.get(device.uuid, (device.uuid,))
            lists = [held.get(uuid) for uuid in group]
            if device.uuid != group[0] or None in lists or sample.reading.host_pid_namespace is False:
                continue
            if device.memory_kind is not None:
                continue  # the operating system uses this memory too, so nobody is named for the rest
            everybody = [(uuid, each) for uuid, some in zip(group, lists, strict=True) for each in some or ()]
            ledger = balance_device(device, [each for _, each in everybody], blind=False)
            if ledger is None or device.error is not None:
                continue
            found[device.uuid] = PoolResult(device.uuid, ledger=ledger)
            state = self.state.setdefault(device.uuid, PoolState())
            if not record_calm(state, ledger, everybody, sample.monotonic):
                holders = tuple(self._pool_holder(uuid, each, bounds, sample) for uuid, each in everybody)
                hidden = _hidden_users(device, sample.reading)
                pools.append(solver.MemoryPool(device.uuid, ledger, holders, hidden))
        if not pools:
            return found
        found |= self._divide(pools, self._moment(devices, held, sample))
        for pool in pools:
            for uuid in {holder.uuid for holder in pool.holders}:
                held[uuid] = _with_uncharged(uuid, held[uuid] or (), found[pool.key])
        return found

    def _divide(self, pools: Sequence[solver.MemoryPool], moment: PoolMoment) -> dict[str, PoolResult]:
        sources = [record_events(self.state[pool.key], pool, moment, self._user_of) for pool in pools]
        foreign = solver.foreign_bytes(sources)
        results = {}
        for each in sources:
            solution = solver.solve(each, foreign)
            record_found(self.state[each.pool.key], each, solution.ranges)
            results[each.pool.key] = _publish(each, solution)
        return results

    def _moment(self, devices: Sequence[DeviceReading], held: Held, sample: Sample) -> PoolMoment:
        listed = frozenset((each.pid, each.start) for some in held.values() for each in some or ())
        silent = {each.uuid for each in devices if not each.divided and held.get(each.uuid) is None}
        elsewhere = self._holdings.newest_holders(silent)
        return PoolMoment(
            sample.monotonic,
            sample.time,
            sample.longest_gap,
            sample.watched,
            listed | (elsewhere or frozenset()),
            complete=elsewhere is not None,
        )

    def _user_of(self, pid: int, start: int | None) -> str | None:
        facts = self._processes.facts_of(pid, start)
        return None if facts is None else facts.user

    def _pool_holder(
        self, uuid: str, holding: Holding, bounds: Mapping[tuple[int, int], int | None], sample: Sample
    ) -> solver.PoolHolder:
        agent = self._agents.agents.get(holding.pid)
        return solver.PoolHolder(
            uuid,
            holding,
            self._processes.owner_of_holding(holding, sample),
            None if holding.start is None else bounds.get((holding.pid, holding.start)),
            None if agent is None else agent.managed(uuid, holding.memory or 0),
        )


def _with_uncharged(uuid: str, holdings: Sequence[Holding], found: PoolResult) -> tuple[Holding, ...]:
    if not found.held:
        return tuple(holdings)
    added = [replace(each, uncharged=found.held.get((uuid, each.pid))) for each in holdings]
    return tuple(sorted(added, key=lambda each: (-(each.held or 0), each.pid)))


def _hidden_users(device: DeviceReading, reading: Reading) -> tuple[HiddenHolder, ...] | None:
    """Return processes with an open device that NVML does not list; children may have a parent's memory."""
    if reading.hidden is None or device.minor is None:
        return None
    listed = {entry.pid for each in reading.devices for entry in each.processes or ()}
    return tuple(
        each
        for each in reading.hidden
        if device.minor in each.minors and each.kind != "monitor" and each.pid not in listed
    )


def _publish(sources: Sources, solution: Solution) -> PoolResult:
    left = tuple(_left_bytes(each, sources) for each in sources.lefts)
    if not sources.bytes:
        return PoolResult(sources.pool.key, left=left)
    shares = solver.share_out(sources, solution)
    held = {
        (sources.able[identity].uuid, identity[0]): describe(_evidence(identity, shares, sources, solution))
        for identity in shares
    }
    return PoolResult(sources.pool.key, held, solver.undivided_bytes(sources, shares, solution.ranges), left)


def _evidence(
    identity: Identity, shares: Mapping[Identity, Range], sources: Sources, solution: Solution
) -> HolderEvidence:
    holder, found = sources.able[identity], solution.ranges
    hidden = sources.hidden[0].pid if sources.hidden else None
    return HolderEvidence(
        shares[identity],
        holder.holding.memory or 0,
        found.get(identity, solver.NOTHING),
        holder.bound,
        holder.reported,
        [
            LeftEvidence(
                found[left],
                created(*left.creator, left.ended),
                [pid for pid, _ in heirs],
                hidden,
                [pid for pid, _ in left.elsewhere],
            )
            for left in sources.lefts
            if identity in (heirs := sources.heirs(left))
        ],
        [pid for pid, _ in solver.rivals_of(shares) - {identity}],
        sources.matched,
        sources.late,
    )


def _left_bytes(left: solver.Left, sources: Sources) -> LeftBytes:
    pids = tuple(sorted(pid for pid, _ in sources.heirs(left) | left.elsewhere))
    return LeftBytes(*left.creator, left.ended, *left.range, pids, created(*left.creator, left.ended))
