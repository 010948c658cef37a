"""Say why a holding exists now: the rules of the states, as pure functions over what was read.

The order of the rules is the order of :class:`vramledger.model.snapshot.State`. Every verdict comes with its
evidence as one sentence. Where the evidence is not sufficient, the verdict is the milder one: a page for an
orphan that is not one costs more trust than an orphan that is found one rule later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vramledger.model.holder_facts import Ties
from vramledger.model.reading import DriverWait, ParentFacts, ProcessFacts, ProcessRow
from vramledger.model.snapshot import Grade, State
from vramledger.readers.owners.cgroups import is_in_service

PASSING = frozenset({State.DEAD, State.ZOMBIE, State.ORPHANED, State.STOPPED})
"""The states through which a normal end goes: a launcher ends before its workers, an exit takes a moment."""

FROZEN = "its cgroup is frozen, as that of a paused container is"

STUCK_AFTER = 60.0
"""Seconds after which a thread that sleeps in the driver is stuck; freeing memory takes milliseconds."""


class StateVerdict(NamedTuple):
    """A state, its evidence in one sentence, and how good that is."""

    state: State
    why: str
    grade: Grade = Grade.INFERRED


class Quiet(NamedTuple):
    """That a holder has been quiet for the idle threshold: how well that is known, and since when.

    ``since`` is a monotonic and a Unix time. ``restarted`` means that the exporter was restarted within this
    time. ``reason`` is the evidence as words, where it is another than the grade's usual one.
    """

    grade: Grade
    since: tuple[float, float]
    restarted: bool = False
    reason: str = ""


def _describe(parent: ParentFacts) -> str:
    return f"{parent.command or parent.comm or 'a program'} (pid {parent.pid})"


def judge_orphan(
    row: ProcessRow, first: ProcessFacts, now: ProcessFacts, ties: Ties | None
) -> StateVerdict | None:
    """Say whether a live process is an orphan: nobody can still want it.

    Who saw its parent end and who came later use the same evidence. That a parent has ended is ``inferred``
    alone: a start script and a daemon end the parent of healthy work too. Where its ties were not looked at
    it is not an orphan, because they may excuse it. ``first``: its facts when we first saw it, with the
    parent of that moment. ``now``: its facts after the last change of parent. ``ties``: what ties it to
    others, if its launcher may have ended.
    """
    before = first.parent
    watched = before is not None and row.ppid != before.pid
    if ties is None or not (watched or ties.adopted):
        return None
    adopter, parent = "", now.parent
    if parent is not None and parent.pid == row.ppid and (watched or parent.init):
        adopter = f"; {_describe(parent)} has adopted it"
    signs = f" ({', '.join(now.signs)})" if now.signs else ""
    if before is not None and watched:
        why = f"its parent {_describe(before)} was seen alive and has ended"
    elif ties.worker:
        why = f"it is a worker{signs} and its launcher has ended"
    elif now.leader_alive is False:
        why = f"the leader of its process group (pid {row.pgrp}) has ended"
    else:
        why = "the program that started it has ended"
    if ties.abandoned:
        dead = "what connected it to its launcher is dead"
        return StateVerdict(State.ORPHANED, f"{why}, and {dead}{adopter}", Grade.PROVEN)
    if not ties.worker and _may_be_wanted(row, now, ties, watched=watched):
        return None
    return StateVerdict(State.ORPHANED, f"{why}{adopter}")


def _may_be_wanted(row: ProcessRow, facts: ProcessFacts, ties: Ties, *, watched: bool) -> bool:
    """Tell whether a process without strong signs of a worker may have been left running on purpose.

    It leads a session or a group, as a daemon and a job at a prompt do; it ignores the signals that ``nohup``
    and a script's background keep away; it has a terminal, or is in a service; or somebody can reach it.
    """
    # Whose parent was seen alive and has ended may be a rank whose title has overwritten its environment.
    unread = watched and "environ" in facts.denied
    own = row.pid in (row.session, row.pgrp) and not (facts.signs or unread)
    background = "HUP" in facts.ignores or ("INT" in facts.ignores and "QUIT" in facts.ignores)
    if own or background or row.tty or is_in_service(facts.cgroup or ()):
        return True
    # A daemon that forked twice is alone in the group of a dead leader, who made session and group.
    daemon = not watched and row.session == row.pgrp != row.pid and not ties.fellows
    return daemon or ties.listening or bool(ties.live or ties.mates)


def classify_unseen(presence: str | None, *, host_pid_namespace: bool | None) -> StateVerdict:
    """Judge a pid that NVML lists and /proc does not show; ``presence`` is as in ``Reading.unseen``."""
    if presence == "gone" and host_pid_namespace is True:
        why = "NVML lists the pid, and this host has no such process"
        return StateVerdict(State.DEAD, why, Grade.PROVEN)
    if presence == "denied":
        return StateVerdict(State.UNKNOWN, "the process exists, but /proc does not show it to us (hidepid)")
    return StateVerdict(State.UNKNOWN, "we are not in the host's PID namespace and cannot see the process")


def stuck_threads(waits: Iterable[DriverWait]) -> dict[tuple[int, int], DriverWait]:
    """Return the longest wait of each process that is stuck in the driver, by pid and start time."""
    ordered = sorted(waits, key=lambda wait: wait.seconds)
    return {(wait.pid, wait.start): wait for wait in ordered if wait.seconds > STUCK_AFTER}


def classify_process(
    row: ProcessRow, orphaned: StateVerdict | None, stuck: DriverWait | None = None, *, frozen: bool = False
) -> StateVerdict | None:
    """Return the state that a process has on all its devices; None means idle or active, device by device.

    What is only ``inferred`` depends on the work of its threads too.
    """
    waits = ""
    if stuck is not None:
        place = f"slept in the driver ({stuck.channel})"
        waits = f"thread {stuck.thread} has {place} for more than {stuck.seconds:.0f} s"
    if row.state in "ZX":
        if row.threads > 1:
            why = f"its main thread has exited, {row.threads - 1} other thread(s) still run"
            if waits:
                return StateVerdict(State.ZOMBIE, f"{why}; {waits}", Grade.PROVEN)
            return StateVerdict(State.ZOMBIE, why)
        why = "it has exited, its parent has not reaped it, the bytes are still held"
        return StateVerdict(State.ZOMBIE, why, Grade.PROVEN)
    if waits:
        return StateVerdict(State.STUCK, f"{waits}, and no signal ends it", Grade.PROVEN)
    stopped = None
    if row.state in "Tt":
        by = "a debugger" if row.state == "t" else "SIGSTOP (or a terminal's ^Z)"
        stopped = StateVerdict(State.STOPPED, f"stopped by {by}", Grade.PROVEN)
    elif frozen:
        stopped = StateVerdict(State.STOPPED, FROZEN, Grade.PROVEN)
    if orphaned is None or (stopped is not None and orphaned.grade is Grade.INFERRED):
        return stopped
    return orphaned


def is_working(quiet: Quiet | None, worked_ago: float | None, idle_after: float) -> bool | None:
    """Tell whether a holder works: True by a sign of work, False if it is proven or seen that it does not."""
    if worked_ago is not None and worked_ago < idle_after:
        return True
    return False if quiet is not None and quiet.grade is not Grade.INFERRED else None


def with_work(orphaned: StateVerdict, *, working: bool | None, idle_after: float) -> StateVerdict:
    """Add to the evidence of an orphan whether it works."""
    words = {
        True: "it still works on the GPU",
        False: f"it has not worked on the GPU for {idle_after:.0f} s",
        None: "whether it works on the GPU is not known",
    }
    return orphaned._replace(why=f"{orphaned.why}; {words[working]}")


def with_busy_without_work(verdict: StateVerdict, seconds: float) -> StateVerdict:
    """Add to the evidence of a holder that it keeps the device busy, which computes and moves nothing."""
    what = f"busy without work for {seconds:.0f} s: it runs a kernel, and the GPU computes and moves nothing"
    if verdict.state is State.ACTIVE:
        return verdict._replace(why=f"{what}, as in a collective that waits for another rank")
    return verdict._replace(why=f"{verdict.why}; {what}")


_IDLE_WHY = {
    Grade.PROVEN: "the GPU's own counters show that nothing ran on it",
    Grade.SEEN: "the GPU did nothing most of the time, and the driver named other holders for the rest",
    Grade.INFERRED: "small work may have been missed",
}


def classify_idle(quiet: Quiet, now: float) -> StateVerdict:
    """Return the verdict on a holder that has been quiet for the idle threshold; ``now`` is monotonic."""
    seconds = now - quiet.since[0]
    reason = quiet.reason or _IDLE_WHY[quiet.grade]
    if quiet.restarted:
        reason = "nothing ran before and after a restart of the exporter, and nothing shows work during it"
    why = f"no sign of GPU work for {seconds:.0f} s; {reason}"
    return StateVerdict(State.IDLE, why, quiet.grade)


_UNCOUNTED = (
    "alive; whether it works cannot be known: the driver has no utilisation of MIG instances, and this GPU "
    "has no GPM counters"
)


def classify_active(
    quiet: float, idle_after: float, *, worked: bool, evidence: bool, uncounted: bool = False
) -> StateVerdict:
    """Say why a holder that lives is not idle.

    ``uncounted``: nothing counts work there: a MIG instance of a GPU without GPM.
    """
    if uncounted and not (evidence and worked):
        return StateVerdict(State.ACTIVE, _UNCOUNTED)
    if not evidence:
        return StateVerdict(State.ACTIVE, "alive; nothing says whether it works, so it is not called idle")
    if worked:
        why = f"GPU work seen {quiet:.0f} s ago" if quiet >= 1 else "working now"
        return StateVerdict(State.ACTIVE, why, Grade.PROVEN)
    why = f"alive; no GPU work seen yet, watched for {quiet:.0f} s of {idle_after:.0f}"
    return StateVerdict(State.ACTIVE, why)
