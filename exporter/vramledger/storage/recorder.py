"""Turn readings, states and summaries of the exporter into messages to the process that writes.

It runs in the exporter, so that only what has changed is sent: 0.5 kB a second for 25 holders.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from vramledger import __version__
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.agent_report import Agent
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Holding, Snapshot
from vramledger.storage import protocol
from vramledger.storage.reduction import difference, reduce_reading
from vramledger.storage.state import write_state
from vramledger.views.timeline import Timeline

STATE_INTERVAL = 120.0
"""Seconds between states: one of 25 holders takes 2.9 kB; a moment is the state and its readings."""

AGENT_INTERVAL = 30.0
"""Seconds for which a stored report of an agent stands for the next ones, unless one has an out-of-memory
error. Only its count of allocations, a sign of work, is stored each second: the other counters change all the
time, and would take four times what everything else takes."""


class Recorder:
    """What was stored last, to store the difference; used by one thread at a time."""

    def __init__(
        self, tracker: HoldingTracker, timeline: Timeline, idle_after: float, interval: float
    ) -> None:
        self._tracker = tracker
        self._timeline = timeline
        self._head = {
            "program": __version__,
            "idle_after": idle_after,
            "interval": interval,
            "owners_max": tracker.owners_max,
        }
        self._before: dict[str, dict[str, Any]] = {}
        self._agents: dict[tuple[int, int], tuple[float, Agent]] = {}
        self._boot = ""
        self._began: float | None = None
        self._state_at = 0.0
        self._newest = 0.0
        self._summed_in: float | None = None
        self._outline: object = None
        self._peaks: dict[str, int] = {}
        self._longest_gap = max(protocol.LONGEST_GAP, 3 * interval)

    def begin_again(self) -> None:
        """Begin a new segment with the next reading: the one that writes has not got everything."""
        self._began = None

    def record(self, reading: Reading) -> Iterator[tuple[bytes, bytes]]:
        """Yield the messages for a reading that the accounting has not seen yet: their kind and content."""
        now = reading.monotonic
        if (
            self._began is None
            or not 0 <= now - self._began < protocol.SEGMENT_SECONDS
            or not 0 <= reading.time - self._newest <= self._longest_gap
            or (reading.boot_id and reading.boot_id != self._boot)
        ):
            self._boot = reading.boot_id or self._boot
            self._began, self._before, self._agents = now, {protocol.STATE: {}, protocol.READING: {}}, {}
            self._summed_in = None
            header = {**self._head, "boot": self._boot, "time": reading.time}
            yield protocol.BEGIN, json.dumps(header).encode()
            yield self._state(reading.time, now)
        elif now - self._state_at >= STATE_INTERVAL:
            yield self._state(self._newest, now)
        self._newest = reading.time
        kept = replace(reading, agents=tuple(self._thin_agents(reading))) if reading.agents else reading
        yield self._entry(protocol.READING, round(reading.time, 2), reduce_reading(kept))

    def summarise(self, snapshot: Snapshot) -> Iterator[tuple[bytes, bytes]]:
        """Yield the message for what the accounting made of the newest reading, if it is time for one."""
        if self._began is None or snapshot.time is None:
            return
        minute, outline = snapshot.time // protocol.MINUTE, _outline(snapshot)
        due = minute != self._summed_in or outline != self._outline
        if due:
            self._summed_in, self._outline = minute, outline
            yield (
                protocol.SUMMARY,
                json.dumps(summarise(snapshot, self._peaks), separators=(",", ":")).encode(),
            )
        before = {} if due else self._peaks
        self._peaks = {
            each.reading.uuid: max(before.get(each.reading.uuid, 0), each.ledger.used)
            for each in snapshot.devices
            if each.ledger is not None
        }

    def last_state(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield the message with the state at our end."""
        if self._began is not None:
            yield self._state(self._newest, self._state_at)

    def _state(self, time: float, monotonic: float) -> tuple[bytes, bytes]:
        self._state_at = monotonic
        return self._entry(protocol.STATE, time, write_state(self._tracker, self._timeline))

    def _entry(self, kind: str, time: float, value: dict[str, Any]) -> tuple[bytes, bytes]:
        patch = difference(self._before[kind], value)
        self._before[kind] = value
        return protocol.ADD, protocol.write_entry(kind, time, patch)

    def _thin_agents(self, reading: Reading) -> Iterator[Agent]:
        kept = {}
        for agent in reading.agents:
            identity = (agent.pid, agent.start)
            before = self._agents.get(identity)
            if (
                before is None
                or reading.monotonic - before[0] >= AGENT_INTERVAL
                or _is_news(before[1], agent)
            ):
                before = reading.monotonic, agent
            kept[identity] = before
            yield _with_allocations(before[1], agent)
        self._agents = kept


def _with_allocations(kept: Agent, agent: Agent) -> Agent:
    """Return the report that is kept, with the newest count of allocations: a sign of work."""
    if kept is agent or kept.report is None or agent.report is None:
        return kept
    counts = {
        (framework.framework, device.ordinal, device.uuid): device.figures["allocations"]
        for framework in agent.report.frameworks
        for device in framework.devices
        if "allocations" in device.figures
    }
    frameworks = tuple(
        replace(
            framework,
            devices=tuple(
                replace(device, allocations=count)
                if (count := counts.get((framework.framework, device.ordinal, device.uuid))) is not None
                else device
                for device in framework.devices
            ),
        )
        for framework in kept.report.frameworks
    )
    return kept._replace(report=replace(kept.report, frameworks=frameworks))


def _is_news(before: Agent, agent: Agent) -> bool:
    if agent.problem != before.problem or (agent.report is None) != (before.report is None):
        return True
    return (
        agent.report is not None
        and before.report is not None
        and (agent.report.last_oom != before.report.last_oom or _ooms(agent) != _ooms(before))
    )


def _ooms(agent: Agent) -> list[int]:
    frameworks = () if agent.report is None else agent.report.frameworks
    return [device.figures.get("ooms", 0) for each in frameworks for device in each.devices]


def summarise(snapshot: Snapshot, peaks: Mapping[str, int]) -> dict[str, Any]:
    """Return the summary of a sample as JSON values, with the most of each device since the one before."""
    return {
        "time": snapshot.time,
        "up": snapshot.up,
        "devices": {
            device.reading.uuid: {
                "gpu": device.reading.index,
                "total": device.ledger.total,
                "used": device.ledger.used,
                "peak": peaks.get(device.reading.uuid),
                "wasted": device.wasted,
                "unattributed": device.ledger.unattributed,
                "holders": {f"{each.pid}/{each.start}": _holder(snapshot, each) for each in device.holdings},
            }
            for device in snapshot.devices
            if device.ledger is not None
        },
        "ooms": {f"{each.type}\n{each.name}\n{each.framework}": each.failures for each in snapshot.ooms},
    }


def _holder(snapshot: Snapshot, holding: Holding) -> protocol.HolderSummary:
    facts = snapshot.facts_of(holding.pid)
    owner = None if facts is None else facts.owner_or_user
    return protocol.HolderSummary(
        "unknown" if owner is None else owner.type,
        "" if owner is None else owner.name,
        "" if facts is None or facts.user is None else facts.user,
        "" if facts is None else facts.command,
        holding.state.value,
        holding.grade.value,
        holding.held,
        holding.wasted,
    )


def _outline(snapshot: Snapshot) -> object:
    """Return what changes whenever more than bytes changes: who holds, in which state, and who ran out."""
    holders = [
        (
            device.reading.uuid,
            sorted((each.pid, each.start or 0, each.state.value, each.left_over) for each in device.holdings),
        )
        for device in snapshot.devices
    ]
    return snapshot.up, holders, snapshot.ooms
