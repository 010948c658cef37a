"""Count failed allocations by owner, also those of programs that have ended since.

A program that does not catch its OutOfMemoryError ends within a second: its agent sends a last report, and no
scrape sees the process afterwards. torch counts its failures itself, on every device, including devices that
we cannot match to a GPU.
"""

from __future__ import annotations

import msgspec

from vramledger.accounting.holders.processes import ProcessTracker, TrackedProcess
from vramledger.accounting.owners.owner_usage import KEPT, OTHER, UNKNOWN
from vramledger.accounting.sample import forget_ended
from vramledger.model.agent_report import Agent, AgentReport
from vramledger.model.reading import Reading
from vramledger.model.snapshot import OwnerOoms, UnixTime

_OWN_COUNT = "ooms"
"""The figure in which torch counts its failures since it started."""


class Told(msgspec.Struct):
    """What one program has reported: torch's own count, and when the newest failure happened."""

    count: int | None = None
    time: float | None = None


class OomsState(msgspec.Struct):
    began: UnixTime | None = None  # the first reading
    told: dict[int, dict[int, Told]] = {}  # what each program has reported, by pid and start
    owners: list[OwnerOoms] = []  # what was counted of each owner and framework


class OomCounter:
    """Count the failed allocations of each owner and framework since the exporter started."""

    def __init__(self, most: int, state: OomsState) -> None:
        """Go on from what is remembered; ``most`` owners have an entry of their own, 0 means all."""
        self._most = most
        self.state = state

    def update(self, reading: Reading, processes: ProcessTracker) -> None:
        """Count the new failures that the reports of a reading have, also those of programs that ended."""
        if self.state.began is None:
            self.state.began = reading.time
        for agent in reading.agents:
            process = processes.get(agent.pid, agent.start)
            foreign = process is not None and process.now.uid not in {None, agent.uid}
            if process is None or agent.report is None or foreign:
                continue
            self._count(agent, agent.report, process, reading.time)
        listed = {(agent.pid, agent.start) for agent in reading.agents}
        forget_ended(
            self.state.told,
            lambda pid, start: (pid, start) in listed or processes.get(pid, start) is not None,
        )

    def totals(self) -> tuple[OwnerOoms, ...]:
        """Return what was counted, by owner and framework; an owner without a failure has no entry."""
        return tuple(sorted(self.state.owners))

    def _count(self, agent: Agent, report: AgentReport, process: TrackedProcess, now: float) -> None:
        began = self.state.began or 0.0
        owner = process.owner or UNKNOWN
        told = self.state.told.setdefault(agent.pid, {})
        known = told.get(agent.start)
        # Failures before the exporter started are not counted: an earlier one may have counted them.
        watched = known is not None or process.shown.start_time >= began
        before = known or Told(0 if watched else None)
        counts = [
            device.figures[_OWN_COUNT]
            for framework in report.frameworks
            for device in framework.devices
            if _OWN_COUNT in device.figures
        ]
        count = sum(counts) if counts else None
        newest = report.last_oom
        is_new = newest is not None and newest.time != before.time and (watched or newest.time >= began)
        told[agent.start] = Told(count if counts else before.count, newest.time if newest else before.time)
        at = min(newest.time, now) if newest is not None else now
        if count is not None and (newest is None or newest.framework == "torch"):
            if before.count is None:
                added = int(is_new)
            else:
                added = count - before.count if count >= before.count else count
            self._add(owner, "torch", added, at if is_new else now)
        elif newest is not None:
            self._add(owner, newest.framework, int(is_new), at)

    def _add(self, owner: tuple[str, str], framework: str, added: int, at: float) -> None:
        if added <= 0:
            return
        owners = {(each.type, each.name, each.framework): each for each in self.state.owners}
        key = (*owner, framework)
        if key not in owners and self._most and len(owners) >= self._most:
            oldest = min(owners, key=lambda each: owners[each].last)
            if at - owners[oldest].last > KEPT:
                del owners[oldest]
            else:
                key = (*OTHER, framework)
        before = owners.get(key)
        count, last = (before.failures, before.last) if before is not None else (0, at)
        owners[key] = OwnerOoms(*key, count + added, max(last, at))
        self.state.owners = list(owners.values())
