"""Hide from others who the users of a host are, and what they run: users, paths and names of programs.

A user has the same stand-in everywhere and after each restart, so that what an owner holds can be followed
and added up. Who has the host's machine-id can find out whom it stands for; it is for the host's users alone.
What a scheduler, a runtime or root has named (jobs, pods, containers, units) stays.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs
from msgspec.structs import replace

from vramledger.accounting.uncharged.tracker import rename_creators
from vramledger.model.agent_report import AgentReport
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.model.snapshot import AgentSnapshot, DeviceSnapshot, Holding, ProcessSnapshot, Snapshot
from vramledger.readers.owners.cgroups import USER_MANAGER, is_personal

_GONE = "…"
_USER = "user"


def host_key(rootfs: Path) -> bytes:
    """Return the key of a host's stand-ins: its machine-id, or one that is new with each start."""
    try:
        return (rootfs / "etc/machine-id").read_bytes().strip()[:64] or secrets.token_bytes(16)
    except OSError:
        return secrets.token_bytes(16)


class HiddenNames:
    """Replace the names in what others see."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    def user(self, name: str) -> str:
        """Return the stand-in of a user; empty for none."""
        return name and f"user-{self._digest(name)}"

    def _digest(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self.key, digest_size=4).hexdigest()

    def owner(self, kind: str, name: str) -> str:
        """Return the name of an owner as others see it."""
        return self.user(name) if kind == _USER else name

    def job(self, name: str) -> str:
        """Return the name of a distributed job; one that meets in a file is named by the file's path."""
        return f"job-{self._digest(name)}" if "/" in name else name

    def snapshot(self, snapshot: Snapshot, viewer: int | None = None) -> Snapshot:
        """Return what others see of a snapshot; a ``viewer``, a user of the host, sees own programs whole."""
        processes = snapshot.processes
        own = set() if viewer is None else _pids_of(snapshot, viewer)
        others = {pid: each for pid, each in processes.items() if pid not in own}
        words = sorted({word for each in others.values() for word in _words(each)}, key=len, reverse=True)
        named = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, words))})(?![\w/-])") if words else None

        def hide(text: str) -> str:
            return named.sub(_GONE, text) if named is not None else text

        mine = {facts.user for pid in own if (facts := processes[pid].facts) is not None}

        def hide_holding(each: Holding) -> Holding:
            uncharged = each.uncharged
            if uncharged is not None:
                why = rename_creators(uncharged.why, lambda name: name if name in mine else self.user(name))
                uncharged = uncharged._replace(why=why)
            return replace(each, why=each.why if each.pid in own else hide(each.why), uncharged=uncharged)

        def hide_agent(pid: int, each: AgentSnapshot) -> AgentSnapshot:
            if pid in own:
                return each
            report = each.report
            if report is not None:
                oom = report.last_oom
                report = structs.replace(
                    report, last_oom=oom and structs.replace(oom, report=None), rank=None
                )
            return replace(each, report=report, why=hide(each.why))

        devices = (self._device(each) for each in snapshot.devices)
        return replace(
            snapshot,
            devices=tuple(
                replace(each, holdings=tuple(map(hide_holding, each.holdings))) for each in devices
            ),
            processes={pid: each if pid in own else self._process(each) for pid, each in processes.items()},
            agents={pid: hide_agent(pid, each) for pid, each in snapshot.agents.items()},
            ooms=tuple(each._replace(name=self.owner(each.type, each.name)) for each in snapshot.ooms),
        )

    def _device(self, device: DeviceSnapshot) -> DeviceSnapshot:
        undivided, usage, status = device.undivided, device.owner_usage, device.reservation_status
        if undivided is not None and undivided.owner is not None:
            kind, name = undivided.owner
            undivided = undivided._replace(owner=(kind, self.owner(kind, name)))
        if usage is not None:
            owners = (each._replace(name=self.owner(each.type, each.name)) for each in usage.owners)
            usage = usage._replace(owners=tuple(owners))
        if status is not None:
            reserved = (each._replace(user=self.user(each.user)) for each in status.reservations)
            status = status._replace(reservations=tuple(reserved))
        return replace(
            device,
            reading=structs.replace(device.reading, limits=None),
            undivided=undivided,
            owner_usage=usage,
            reservation_status=status,
            left=tuple(
                each._replace(
                    user=self.user(each.user or "") or None, why=rename_creators(each.why, self.user)
                )
                for each in device.left
            ),
            hidden=device.hidden
            and tuple(
                each._replace(command="", user=self.user(each.user or "") or None) for each in device.hidden
            ),
            limits=tuple(
                each._replace(name=self.owner(each.type, each.name), cgroup=None) for each in device.limits
            ),
        )

    def _process(self, process: ProcessSnapshot) -> ProcessSnapshot:
        facts = process.facts
        if facts is not None:
            facts = ProcessFacts(
                facts.pid,
                facts.start,
                user=None if facts.user is None else self.user(facts.user),
                nspid=facts.nspid,
                signs=facts.signs,
                owner=None if facts.owner is None else self._facts_owner(facts.owner),
                libraries=facts.libraries,
                rank=facts.rank and facts.rank._replace(job=self.job(facts.rank.job)),
            )
        told = process.reported_rank
        told = told and structs.replace(told, job=self.job(told.job))
        return replace(process, facts=facts, first=None, reported_rank=told)

    def _facts_owner(self, owner: Owner) -> Owner:
        users = is_personal(owner.unit) or USER_MANAGER.fullmatch(owner.unit) or owner.type == _USER
        name = self.owner(owner.type, owner.name)
        return owner._replace(name=name, unit="" if users else owner.unit, notebook="")

    def report(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """Return what others see of the report of a span."""
        owners = [
            {
                **each,
                "owner": self.owner(each["owner_type"], each["owner"]),
                "users": [self.user(name) for name in each["users"]],
            }
            for each in report["owners"]
        ]
        marks = {name: self.marks(report[name]) for name in ("leftovers", "ooms", "interruptions")}
        return {**report, "owners": owners, **marks}

    def marks(self, marks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what others see of what happened: its owner is written as type and name."""
        return [{**each, "owner": self._written(each["owner"]), "command": ""} for each in marks]

    def _written(self, owner: str) -> str:
        kind, space, name = owner.partition(" ")
        return f"{kind}{space}{self.owner(kind, name)}"


def _pids_of(snapshot: Snapshot, uid: int) -> set[int]:
    processes = snapshot.processes.items()
    return {pid for pid, each in processes if each.facts is not None and each.facts.uid == uid}


def _words(process: ProcessSnapshot) -> Iterator[str]:
    for facts in (process.facts, process.first):
        if facts is None:
            continue
        found = [facts.user, facts.comm, facts.command]
        if facts.owner is not None:
            found += [facts.owner.notebook, facts.owner.name if facts.owner.type == _USER else ""]
        if facts.parent is not None:
            found += [facts.parent.user, facts.parent.comm, facts.parent.command, facts.parent.program]
        yield from filter(None, found)


def public_view(snapshot: Snapshot, uid: int) -> Snapshot:
    """Return what a user may see without a password: own programs, and what everybody may."""
    own = _pids_of(snapshot, uid)
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
            last_oom=None if oom is None else structs.replace(oom, report=None),
        )
    return replace(agent, report=report)
