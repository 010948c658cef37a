"""Decide which process owns the bytes that NVML lists under a pid that was reused.

A process is (pid, start time), and NVML knows only the pid. A driver that leaks memory goes on listing the
pid of a process that has ended, and the kernel may give this pid to a program that holds nothing at all. We
know that in two ways: we saw the holder before, or the program does not use a GPU.
"""

from __future__ import annotations

import enum

from vramledger.accounting.holding import HoldingState
from vramledger.accounting.sample import Sample
from vramledger.accounting.states import StateVerdict
from vramledger.model.reading import ProcessEntry, ProcessRow
from vramledger.model.snapshot import Grade, State

CLOCK_SLACK = 1.0
"""Seconds by which a start time, in ticks since a boot time of whole seconds, may seem too early."""


class PidUse(enum.Enum):
    """Which process has the pid of a known holding now, when the start time differs from the one before."""

    HOLDER = "its holder, which /proc did not show so far"
    SUCCESSOR = "another process, while the bytes still belong to the holder"
    NEW_HOLDER = "another process, with bytes of its own"


def pid_use(state: HoldingState, entry: ProcessEntry, row: ProcessRow, sample: Sample) -> PidUse:
    """Tell which process has the pid of a holding whose start time differs from that of the row.

    If the pid now names another process and the bytes are unchanged, they belong to the first process. A
    process that starts with exactly what its predecessor held is unlikely; a pid that is reused while the
    driver leaks its bytes is not.
    """
    started = sample.started_at(row.start)
    if state.start is None and not (state.state is State.DEAD and started > state.updated):
        return PidUse.HOLDER
    same_bytes = entry.memory is not None and entry.memory == state.memory
    if same_bytes and (row.start == state.pid_successor or started > state.updated - CLOCK_SLACK):
        return PidUse.SUCCESSOR
    return PidUse.NEW_HOLDER


def classify_reused(state: HoldingState, sample: Sample) -> StateVerdict | None:
    """Classify a holding whose pid belongs to another process; return None for any other holding."""
    if state.pid not in sample.rows:
        return None
    if state.pid_successor is not None:
        why = "its process has ended, and the pid now belongs to another program"
        return StateVerdict(State.DEAD, why, Grade.PROVEN)
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


def same_process(before: int | None, now: int | None) -> bool:
    """Tell whether two start times of a pid can belong to one process; an unknown start time matches any."""
    return before is None or now is None or before == now
