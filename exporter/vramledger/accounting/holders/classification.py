"""Say why a holding exists: the rules of the states for one holding, in the order in which they apply."""

from __future__ import annotations

from collections.abc import Iterable

from vramledger.accounting.holders import states
from vramledger.accounting.holders.holding import HoldingState
from vramledger.accounting.holders.states import Quiet, StateVerdict
from vramledger.accounting.sample import DeviceSample, Sample
from vramledger.model.snapshot import Grade, State


def classify(  # noqa: PLR0913 one argument a fact
    state: HoldingState,
    on_device: DeviceSample,
    quiet: Quiet | None,
    idle_after: float,
    *,
    working: bool | None,
    xids: Iterable[int],
    told_after: float = 0.0,
) -> StateVerdict:
    """Say why a holding exists, once that has lasted: what passes in a moment is the end of a program.

    ``quiet``: that it was quiet for the idle threshold, and how well that is known. ``told_after``: seconds
    for which a state of :data:`states.PASSING` must last before it is told.
    """
    verdict = _classify_now(state, on_device, quiet, idle_after, working=working, xids=xids)
    seconds = state.follow(verdict, on_device.sample)
    if seconds is None or seconds >= told_after:
        return verdict
    so_far = f"for {seconds:.0f} s so far: {verdict.why}"
    if state.state not in (None, State.ACTIVE, State.IDLE):
        return StateVerdict(state.state, so_far, state.grade or Grade.INFERRED)
    if state.pid not in on_device.sample.rows:
        return StateVerdict(state.state or State.UNKNOWN, so_far)
    found = _classify_work(state, quiet, on_device, idle_after)
    return found._replace(why=f"{found.why}; {so_far}")


def _classify_now(  # noqa: PLR0911, PLR0913 one argument a fact, one result a rule
    state: HoldingState,
    on_device: DeviceSample,
    quiet: Quiet | None,
    idle_after: float,
    *,
    working: bool | None,
    xids: Iterable[int],
) -> StateVerdict:
    sample = on_device.sample
    reused = _classify_reused(state, sample)
    if reused is not None:
        return reused
    if state.pid not in sample.rows:
        presence = sample.reading.unseen.get(state.pid)
        return states.classify_unseen(presence, host_pid_namespace=sample.reading.host_pid_namespace)
    verdict = sample.verdicts[state.pid]
    if verdict is None:
        return _classify_work(state, quiet, on_device, idle_after)
    zombie = verdict.state is State.ZOMBIE
    if verdict.grade is Grade.INFERRED and zombie is not (working is False):
        # Its threads work, or may; or it does not work, which is certain, and that it was left behind is not.
        found = _classify_work(state, quiet, on_device, idle_after)
        return found._replace(why=f"{found.why}; {verdict.why}")
    if zombie and quiet is not None and verdict.grade is Grade.INFERRED:
        return verdict._replace(grade=quiet.grade)
    if verdict.state is State.ORPHANED:
        return states.with_work(verdict, working=working, idle_after=idle_after)
    if verdict.state is State.STUCK and xids:
        numbers = ", ".join(map(str, sorted(xids)))
        return verdict._replace(why=f"{verdict.why}; this GPU has had XID {numbers}")
    return verdict


def _classify_work(
    state: HoldingState, quiet: Quiet | None, on_device: DeviceSample, idle_after: float
) -> StateVerdict:
    sample, device = on_device.sample, on_device.device
    if quiet is not None:
        return states.classify_idle(quiet, sample.monotonic)
    seconds = sample.monotonic - state.quiet_since[0]
    return states.classify_active(
        seconds,
        idle_after,
        worked=state.last_active is not None,
        evidence=state.evidence,
        uncounted=(
            device.parent is not None
            and device.gpu_instance is not None  # without its number nobody can ask for its counters
            and device.activity is None
            and "activity" not in device.failed
        ),
    )


def _classify_reused(state: HoldingState, sample: Sample) -> StateVerdict | None:
    if state.pid not in sample.rows:
        return None
    if state.pid_successor is not None:
        why = "its process has ended, and the pid now belongs to another program"
        if state.outlived:
            return StateVerdict(State.DEAD, f"{why}, which does not use the GPU", Grade.PROVEN)
        return StateVerdict(State.UNKNOWN, f"{why}; which of them has the bytes is not known")
    if not state.bystander:
        return None
    if sample.reading.host_pid_namespace is not True:
        return StateVerdict(
            State.UNKNOWN, "in our PID namespace, another program has this pid; it does not use the GPU"
        )
    return StateVerdict(
        State.DEAD,
        "its process has ended: the program that has the pid now does not use the GPU (it has no device file "
        "open and maps no library of the driver)",
        Grade.PROVEN,
    )
