"""Say why a holding exists now: the rules of the states, as pure functions over what was read.

The order of the rules is the order of :class:`vramledger.model.snapshot.State`. Every verdict comes with its
evidence as one sentence. Where the evidence is not sufficient, the verdict is the milder one: a page for an
orphan that is not one costs more trust than an orphan that is found one rule later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from vramledger.model.reading import DriverWait, ParentFacts, ProcessFacts, ProcessRow
from vramledger.model.snapshot import Grade, State

SHELLS = frozenset("sh ash bash dash zsh fish ksh ksh93 mksh csh tcsh busybox nu xonsh pwsh".split())
"""A job whose shell has gone is what ``nohup``, ``disown`` and a closed terminal leave behind: it is not an
orphan."""

TERMINALS = frozenset(
    "tmux screen zellij byobu gnome-terminal konsole xterm kitty alacritty foot wezterm-gui xfce4-terminal"
    " mosh-server ttyd script expect dtach abduco".split()
)
LOGINS = frozenset("sshd sshd-session login su sudo doas runuser getty agetty gdm-session-wor".split())
SERVICE_MANAGERS = frozenset(
    "systemd init upstart openrc-run supervise-daemo supervisord runsv runsvdir s6-supervise s6-svscan"
    " circusd monit cron crond atd anacron containerd-shim conmon runc crun docker-init podman kubelet"
    " slurmstepd slurmd pbs_mom sge_execd sge_shepherd condor_starter nomad start-stop-daem".split()
)
WRAPPERS = frozenset(
    "env nohup setsid nice ionice chrt taskset numactl timeout time stdbuf unbuffer flock chroot unshare"
    " nsenter bwrap xargs parallel watch".split()
)
"""A wrapper starts one program and waits; the program is the job itself, not a worker of the wrapper."""

OBSERVERS = frozenset(
    "nsys nsys-launcher nsys-ui ncu ncu-ui nv-nsight-cu-cl nvprof compute-sanitize cuda-memcheck cuda-gdb gdb"
    " gdbserver lldb lldb-server rr strace ltrace perf py-spy memray scalene austin valgrind".split()
)
"""Profilers and debuggers: the program that they started is the job, and may continue without them."""

SERVICE_STARTERS = frozenset("systemd init".split())
"""A service starter makes every service that it starts the leader of a session, so it adopted its other
children."""

CONTAINER_STARTERS = frozenset("containerd-shim conmon".split())
"""A container starter makes the programs that it starts lead their sessions, and does not itself have the
container's variables."""

MINIMAL_INITS = frozenset("tini tini-static dumb-init docker-init catatonit podman-init".split())
"""A minimal init immediately starts one program, makes it the leader of its own process group, and after that
only adopts processes."""

TINI = frozenset("tini tini-static docker-init".split())
"""Tini, which Docker calls docker-init, does not make its program the leader of a session."""

STUCK_AFTER = 60.0
"""Seconds after which a thread that sleeps in the driver is stuck. Milliseconds are usual, for example while
the driver frees memory."""

STARTED_AT_ONCE_TICKS = 5
"""The maximum number of clock ticks between the start of a minimal init and that of its program: it forks
before it does anything else. A launcher takes longer."""

IDLE_INITS = frozenset("sleep tail pause".split())
"""Such a program starts nothing when it is pid 1 of a container."""

COMMAND_SIGNS = frozenset("multiprocessing title jupyter".split())
"""Worker evidence that is in the command line, which a child does not inherit."""

STRONG_WORKER_EVIDENCE = frozenset(
    "multiprocessing title jupyter TORCHELASTIC_RUN_ID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK"
    " RAY_RAYLET_PID".split()
)
"""Only a launcher sets these; LOCAL_RANK, for example, people also set by hand."""


class StateVerdict(NamedTuple):
    """A state, its evidence in one sentence, and how good that is."""

    state: State
    why: str
    grade: Grade = Grade.INFERRED


class Quiet(NamedTuple):
    """That a holder has been quiet for the idle threshold: how well that is known, and since when.

    ``since`` is a monotonic and a Unix time. ``counted`` is for how many seconds no launch was counted, None
    if that is not the evidence. ``restarted`` means that the exporter was restarted within this time.
    """

    grade: Grade
    since: tuple[float, float]
    counted: float | None = None
    restarted: bool = False


def base_name(comm: str) -> str:
    """Strip what programs add to their kernel name: ``tmux: server``, ``(systemd)``, ``-bash``."""
    name = comm.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0].strip("()-")
    return "containerd-shim" if name.startswith("containerd-shim") else name.rstrip("-")


def starts_jobs(parent: ParentFacts) -> bool:
    """Tell whether a parent only starts jobs (shell, terminal, login, service manager, wrapper).

    The end of such a parent says nothing about its child, which was never its worker.
    """
    # A script's kernel name is the script's own (run-all.sh); its command is the shell that runs it.
    names = {base_name(parent.comm), base_name(parent.command)}
    groups = (SHELLS, TERMINALS, LOGINS, SERVICE_MANAGERS, WRAPPERS, OBSERVERS)
    return any(not names.isdisjoint(group) for group in groups)


def _describe(parent: ParentFacts) -> str:
    return f"{parent.command or parent.comm or 'a program'} (pid {parent.pid})"


def orphan_evidence(
    row: ProcessRow, first: ProcessFacts, now: ProcessFacts, *, host_pid_namespace: bool | None
) -> str | None:
    """Say why a live process is an orphan, or None.

    Args:
        row: its newest row.
        first: its facts when we first saw it, with the parent of that moment.
        now: its facts after the last change of parent.
        host_pid_namespace: whether pid 1 is the host's own init.
    """
    before = first.parent
    if before is not None and row.ppid != before.pid:
        if starts_jobs(before) or _detached(row, first):
            return None
        adopter = f"; {_describe(now.parent)} has adopted it" if now.parent else ""
        return f"its parent {_describe(before)} was seen alive and has ended{adopter}"
    return _late_evidence(row, first, host_pid_namespace=host_pid_namespace)


def _detached(row: ProcessRow, first: ProcessFacts) -> bool:
    """Tell whether a process was left running on purpose: a daemon whose starter waited until it was ready.

    It leads its own session, and nothing says that it is a worker. A rank of torchrun leads its own session
    too, but its environment says that it is a rank. Where we may not read the environment, we take it for a
    daemon: to see less must not make the verdict harsher.
    """
    return row.session == row.pid and not first.signs


def _late_evidence(row: ProcessRow, facts: ProcessFacts, *, host_pid_namespace: bool | None) -> str | None:
    """Judge a process whose parent may have ended before we first saw it.

    Measured on torchrun (2026-11): a rank leads its own session and group, so only its environment tells it
    from a daemon. Measured on shells: a job in the background of a script keeps the script's group and
    ignores SIGINT and SIGQUIT; a job under ``nohup`` ignores SIGHUP.
    """
    parent = facts.parent
    service = facts.service_main or facts.may_be_service_main
    if parent is None or service or (len(facts.nspid) > 1 and facts.nspid[-1] == 1):
        return None
    host_init = parent.pid == 1 and host_pid_namespace is True
    adopted = _is_adopted(row, parent, host_init=host_init)
    adopter = f"; {_describe(parent)} has adopted it"
    leader_gone = facts.leader_alive is False
    signs = _own_signs(facts, parent, host_init=host_init)
    evidence = None
    if adopted is False:
        pass
    elif signs and (adopted or host_init or _may_only_adopt(row, parent, signs) or leader_gone):
        strong = not STRONG_WORKER_EVIDENCE.isdisjoint(signs)
        # Somebody may have set a weak sign by hand, for a job that was meant to outlive its shell.
        weak = (leader_gone or row.session == row.pid) and not _left_on_purpose(facts)
        if strong or weak:
            evidence = f"it is a worker ({', '.join(signs)}) and its launcher has ended{adopter}"
    elif adopted and leader_gone and row.session != row.pgrp and not _left_on_purpose(facts):
        evidence = f"the leader of its process group (pid {row.pgrp}) has ended{adopter}"
    return evidence


def _left_on_purpose(facts: ProcessFacts) -> bool:
    """Tell whether a process was started with ``nohup``, or in the background of a script that has ended."""
    return "HUP" in facts.ignores or ("INT" in facts.ignores and "QUIT" in facts.ignores)


def _is_adopted(row: ProcessRow, parent: ParentFacts, *, host_init: bool) -> bool | None:
    """Tell whether another process than the parent started a process; None where that is not known.

    A parent adopts only as pid 1 of a PID namespace or as a subreaper. A shell is never a subreaper, so a
    shell that is not pid 1 has started its child. So has a parent outside the child's PID namespace.
    """
    name = base_name(parent.comm)
    leads_session = row.session == row.pid
    adopted: bool | None = None
    if parent.outside:
        adopted = False
    elif host_init or name in SERVICE_STARTERS:
        adopted = None if leads_session else True
    elif name in CONTAINER_STARTERS:
        adopted = not leads_session
    elif name in MINIMAL_INITS:
        late = row.start - parent.start > STARTED_AT_ONCE_TICKS
        adopted = row.pgrp != row.pid or late or (leads_session and name in TINI)
    elif not parent.init:
        adopted = False  # a live supervisor, perhaps a subreaper: the process is its own child
    elif name in IDLE_INITS:
        adopted = True
    return adopted


def _may_only_adopt(row: ProcessRow, parent: ParentFacts, signs: tuple[str, ...]) -> bool:
    """Tell whether a parent cannot have started such a worker, if :func:`_is_adopted` does not know.

    A shell makes no process the leader of a session, and a service manager is not a launcher.
    """
    name = base_name(parent.comm)
    strong = not STRONG_WORKER_EVIDENCE.isdisjoint(signs)
    return name in SERVICE_STARTERS or (name in SHELLS and strong and row.session == row.pid)


def _own_signs(facts: ProcessFacts, parent: ParentFacts, *, host_init: bool) -> tuple[str, ...]:
    """Return the worker evidence that the parent cannot have passed to the process.

    A container has variables for all of its processes, which say nothing. Where the parent's environment is
    not readable, only the command line counts.
    """
    if host_init or base_name(parent.comm) in SERVICE_STARTERS:
        return facts.signs
    inherited = facts.signs if parent.signs is None else parent.signs
    return tuple(sign for sign in facts.signs if sign in COMMAND_SIGNS or sign not in inherited)


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
    row: ProcessRow,
    orphaned: str | None,
    stuck: DriverWait | None = None,
    *,
    orphan_grade: Grade = Grade.INFERRED,
) -> StateVerdict | None:
    """Return the state that a process has on all its devices; None means idle or active, device by device.

    Args:
        row: its newest row.
        orphaned: the evidence that it is an orphan.
        stuck: the longest wait of its threads in the driver, if one is long enough.
        orphan_grade: how good the evidence that it is an orphan is.
    """
    waits = ""
    if stuck is not None:
        place = f"slept in the driver ({stuck.channel})"
        waits = f"thread {stuck.thread} has {place} for more than {stuck.seconds:.0f} s"
    if row.state in "ZX":
        if row.threads > 1:
            live = row.threads - 1
            why = f"its main thread has exited, {live} other thread(s) still run"
            return StateVerdict(State.ZOMBIE, f"{why}; {waits}" if waits else why, Grade.PROVEN)
        why = "it has exited, its parent has not reaped it, the bytes are still held"
        return StateVerdict(State.ZOMBIE, why, Grade.PROVEN)
    if waits:
        return StateVerdict(State.STUCK, f"{waits}, and no signal ends it", Grade.PROVEN)
    if orphaned is not None:
        return StateVerdict(State.ORPHANED, orphaned, orphan_grade)
    if row.state in "Tt":
        by = "a debugger" if row.state == "t" else "SIGSTOP (or a terminal's ^Z)"
        return StateVerdict(State.STOPPED, f"stopped by {by}", Grade.PROVEN)
    return None


def is_working(quiet: Quiet | None, worked_ago: float | None, idle_after: float) -> bool | None:
    """Tell whether a holder works: True by a sign of work, False if it is proven or seen that it does not.

    Args:
        quiet: that it was quiet for the idle threshold, and how well that is known.
        worked_ago: seconds since the last sign of work, None if none was ever seen.
        idle_after: after how many seconds without work it no longer works.
    """
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
    reason = _IDLE_WHY[quiet.grade]
    if quiet.restarted:
        reason = "nothing ran before and after a restart of the exporter, and nothing shows work during it"
    elif quiet.counted is not None:
        reason = f"no launch, copy or memset was counted in the last {quiet.counted:.0f} s"
    why = f"no sign of GPU work for {seconds:.0f} s; {reason}"
    return StateVerdict(State.IDLE, why, quiet.grade)


_UNCOUNTED = (
    "alive; whether it works cannot be known: the driver has no utilisation of MIG instances, and this GPU "
    "has no GPM counters; 'vramledger serve --collector.launches' can count its launches"
)


def classify_active(
    quiet: float, idle_after: float, *, worked: bool, evidence: bool, uncounted: bool = False
) -> StateVerdict:
    """Say why a holder that lives is not idle.

    Args:
        quiet: for how many seconds every sample has shown that no work was done.
        idle_after: after how many such seconds a process is idle.
        worked: whether work was ever seen.
        evidence: whether the newest sample shows anything, work or no work.
        uncounted: nothing counts work there: a MIG instance of a GPU without GPM, without counted launches.
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
