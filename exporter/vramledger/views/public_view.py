"""Reduce a snapshot to what the page shows of other users' programs.

A user of the host who asks over the control socket gets no more of another user's program than the page
shows to everybody. Of own programs there is everything.
"""

from __future__ import annotations

from dataclasses import replace

from vramledger.model.agent_report import AgentReport
from vramledger.model.reading import ProcessFacts
from vramledger.model.snapshot import AgentSnapshot, ProcessSnapshot, Snapshot


def public_view(snapshot: Snapshot, uid: int) -> Snapshot:
    """Return what a user may see of a snapshot where the page asks for no password."""
    own = {
        pid for pid, each in snapshot.processes.items() if each.facts is not None and each.facts.uid == uid
    }
    return replace(
        snapshot,
        processes={
            pid: each if pid in own else _public_process(each) for pid, each in snapshot.processes.items()
        },
        rows={pid: row for pid, row in snapshot.rows.items() if pid in own},
        agents={pid: each if pid in own else _public_agent(each) for pid, each in snapshot.agents.items()},
    )


def _public_process(process: ProcessSnapshot) -> ProcessSnapshot:
    facts = process.facts
    if facts is not None:
        known = (facts.uid, facts.user)
        facts = ProcessFacts(facts.pid, facts.start, *known, command=facts.command, owner=facts.owner)
    return replace(process, facts=facts, first=None, reported_rank=None)


def _public_agent(agent: AgentSnapshot) -> AgentSnapshot:
    report = agent.report
    if report is not None:
        oom = report.last_oom
        report = AgentReport(
            report.sequence,
            report.interval,
            agent=report.agent,
            consents=report.consents,
            last_oom=None if oom is None else oom._replace(report=None),
        )
    return replace(agent, report=report)
