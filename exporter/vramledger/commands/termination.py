"""End holders safely: select them by what is known, show it, and never signal another process.

Selecting is pure. Ending goes through a pidfd: it is opened first, then the start time is compared. So only
the selected process can get the signal, even when its pid was reused.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from msgspec import Struct

from vramledger.accounting.owners.owner_usage import UNKNOWN, Key, owner_of
from vramledger.errors import VramledgerError
from vramledger.model.reading import HiddenHolder, ProcessRow
from vramledger.model.snapshot import DeviceSnapshot, Grade, Holding, Snapshot, State
from vramledger.verdicts.cleanliness import amount, describe_process, device_matches, owner_matches
from vramledger.verdicts.remedies import able_hidden
from vramledger_agent.printable import printable

LAST_WAIT = 10.0
"""Seconds after SIGKILL until we give up on a process: a call that is stuck in the driver keeps it alive."""

_LONGEST_POLL = 86400.0
"""Seconds; poll takes milliseconds as a C int, which ends after 24 days."""


class Selection(Struct, frozen=True):
    """Which holders to end: who fits all selectors; working orphans only with ``working`` or by pid."""

    pids: frozenset[int] = frozenset()
    states: frozenset[State] = frozenset()
    owners: frozenset[str] = frozenset()
    gpus: frozenset[str] = frozenset()
    working: bool = False

    @property
    def spares_working_orphans(self) -> bool:
        """Whether orphans are selected by their state, except those that work or may work."""
        return State.ORPHANED in self.states and not self.working


class EndTarget(Struct, frozen=True):
    """A selected holder, over all its devices."""

    pid: int  # its pid
    start: int | None  # start time in ticks since boot, None when it has no process
    about: str  # its program and owner
    memory: dict[Key, int | None]  # bytes by the device's (index, UUID), None where NVML does not report them
    states: frozenset[State]  # its states on these devices
    why: str  # the evidence for its state
    grade: Grade  # how good that is
    refusal: str | None  # why it must not be ended, None when it may be ended

    @property
    def line(self) -> str:
        """What would be ended, how much it holds, and why it is ended or not."""
        verb = "would not end" if self.refusal else "would end"
        where = ", ".join(f"{amount(held)} on GPU {gpu}" for (gpu, _), held in sorted(self.memory.items()))
        states = "/".join(sorted(state.value for state in self.states)) or "hidden"
        tail = self.refusal or f"{self.why} ({self.grade.value})"
        return printable(f"{verb} pid {self.pid} {self.about}: {states}, {where}: {tail}")


def select_targets(snapshot: Snapshot, selection: Selection, own: Collection[int]) -> list[EndTarget]:
    """Return selected holders by pid, also those of ``own``, which must not be ended."""
    held: dict[int, list[tuple[DeviceSnapshot, Holding]]] = {}
    for device in snapshot.devices:
        for holding in device.holdings:
            held.setdefault(holding.pid, []).append((device, holding))
    targets = {
        pid: _target(snapshot, pid, holdings, selection, own)
        for pid, holdings in held.items()
        if _selected(snapshot, pid, holdings, selection)
    }
    for device in snapshot.devices:
        for each in device.hidden or ():
            if each.pid in selection.pids and each.pid not in held:
                targets[each.pid] = _heir(each, device, targets.get(each.pid), own)
    return [targets[pid] for pid in sorted(targets)]


def _heir(
    holder: HiddenHolder, device: DeviceSnapshot, known: EndTarget | None, own: Collection[int]
) -> EndTarget:
    """Return a process that NVML does not list, and that may keep the bytes of one that has ended."""
    return EndTarget(
        pid=holder.pid,
        start=holder.start,
        about=f"{holder.command} of user {holder.user or '?'}",
        memory={**({} if known is None else known.memory), device.key: None},
        states=frozenset(),
        why="NVML does not list it; it has the GPU open, and may keep what an ended process held",
        grade=Grade.INFERRED,
        refusal=_protected(holder.pid, own),
    )


def _protected(pid: int, own: Collection[int]) -> str | None:
    if pid == 1:
        return "it is init"
    return "it is this program, or what started it" if pid in own else None


def _selected(
    snapshot: Snapshot, pid: int, holdings: list[tuple[DeviceSnapshot, Holding]], selection: Selection
) -> bool:
    owner = owner_of(snapshot.facts_of(pid)) or UNKNOWN
    return (
        (not selection.pids or pid in selection.pids)
        and (not selection.states or any(each.state in selection.states for _, each in holdings))
        and (not selection.owners or owner_matches(selection.owners, owner))
        and (not selection.gpus or any(device_matches(selection.gpus, device) for device, _ in holdings))
    )


def _target(
    snapshot: Snapshot,
    pid: int,
    holdings: list[tuple[DeviceSnapshot, Holding]],
    selection: Selection,
    own: Collection[int],
) -> EndTarget:
    row = snapshot.rows.get(pid)
    states = frozenset(each.state for _, each in holdings)
    refusal = _protected(pid, own) or _cannot_end(row, states, [device for device, _ in holdings])
    if refusal is None and pid not in selection.pids:
        refusal = _may_not_end(states, [each for _, each in holdings], working=selection.working)
    return EndTarget(
        pid=pid,
        start=None if row is None else row.start,
        about=describe_process(snapshot.facts_of(pid)),
        memory={device.key: each.held for device, each in holdings},
        states=states,
        why=holdings[0][1].why,
        grade=holdings[0][1].grade,
        refusal=refusal,
    )


def _cannot_end(
    row: ProcessRow | None, states: Collection[State], devices: Iterable[DeviceSnapshot]
) -> str | None:
    """Return why no signal would end a holder, or reach it; None if one would."""
    ended = State.DEAD in states or (State.ZOMBIE in states and row is not None and row.threads <= 1)
    kept = [str(pid) for device in devices for pid in able_hidden(device)] if ended else []
    if kept:
        heirs = " and ".join(dict.fromkeys(kept))
        return f"its process has ended; hidden pid {heirs} has the GPU open and may keep it: end it by --pid"
    if State.DEAD in states:
        return "its process has ended; only a reset of the GPU frees the memory"
    if State.UNKNOWN in states or row is None:
        return "we may not see which process it is"
    if ended:
        return f"it has exited already; that its parent (pid {row.ppid}) has not reaped it keeps no memory"
    if State.STUCK in states:
        return "no signal ends it: a thread waits in the driver; reset the GPU or restart the node"
    return None


def _may_not_end(states: Collection[State], holdings: Sequence[Holding], *, working: bool) -> str | None:
    """Return why a holder that was not named by its pid stays; None if it may be ended."""
    if State.ORPHANED in states and not working and not all(each.working is False for each in holdings):
        works = any(each.working for each in holdings)
        known = "it still works on the GPU" if works else "whether it works on the GPU is not known"
        return f"{known}; to end it anyway, name it with --pid or add --working"
    if any(each.state is State.ORPHANED and not each.left_over for each in holdings):
        return "that it was left behind is only inferred, somebody may want it; to end it, name it with --pid"
    if any(each.state is State.IDLE and each.grade is Grade.INFERRED for each in holdings):
        return (
            "that it is idle is only inferred, small work may have been missed; to end it, name it with --pid"
        )
    if State.ACTIVE in states:
        return "it is active; to end it anyway, name it with --pid"
    return None


class Termination:
    """The ending of one target, whose process is held by a pidfd; a context manager that closes it."""

    def __init__(self, target: EndTarget, start_of: Callable[[int], int | None]) -> None:
        """Open a process' pidfd; ``start_of`` gives a pid's start. Raises VramledgerError without pidfds."""
        self.target = target  # the holder to end
        self.outcome: str | None = None  # the result as words, None while not finished
        self.ended = False
        self._descriptor: int | None = None
        try:
            self._descriptor = os.pidfd_open(target.pid)
        except ProcessLookupError:
            self.settle_outcome("it has ended by itself", ended=True)
            return
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.ENOSYS:
                self.settle_outcome(f"no pidfd of its process can be opened: {error.strerror}")
                return
            raise VramledgerError(
                "ending processes safely needs pidfd_open, which Linux has from 5.3 on"
            ) from error
        if start_of(target.pid) != target.start:
            self.settle_outcome("its pid now belongs to another process, which got no signal", ended=True)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is still there."""
        if self._descriptor is None or self.outcome is not None:
            return
        try:
            signal.pidfd_send_signal(self._descriptor, number)
        except ProcessLookupError:
            self.settle_outcome("it has ended by itself", ended=True)
        except PermissionError:
            self.settle_outcome("not permitted: it belongs to another user; run this as that user or as root")

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; tell whether it has ended."""
        if self._descriptor is None or self.outcome is not None:
            return self.ended
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        deadline = time.monotonic() + seconds
        while not poll.poll(min(max(0.0, deadline - time.monotonic()), _LONGEST_POLL) * 1000):
            if time.monotonic() >= deadline:
                return False
        return True

    def settle_outcome(self, outcome: str, *, ended: bool = False) -> None:
        """Record the outcome, unless that is known already."""
        if self.outcome is None:
            self.outcome, self.ended = outcome, ended

    def close(self) -> None:
        """Close the pidfd."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def end_targets(
    targets: Collection[EndTarget],
    start_of: Callable[[int], int | None],
    grace: float,
    *,
    last_wait: float = LAST_WAIT,
) -> list[Termination]:
    """End these holders: SIGTERM to all, and SIGKILL to those that still run after ``grace`` seconds.

    A stopped process gets SIGCONT as well, or it could not act on SIGTERM. Raises VramledgerError if this
    kernel has no pidfd.
    """
    terminations: list[Termination] = []
    try:
        for target in targets:
            terminations.append(Termination(target, start_of))  # noqa: PERF401 those that are open must be closed
        for termination in terminations:
            termination.signal(signal.SIGTERM)
            if State.STOPPED in termination.target.states:
                termination.signal(signal.SIGCONT)
        for termination in _await_exits(terminations, grace, "ended by SIGTERM"):
            termination.signal(signal.SIGKILL)
        for termination in _await_exits(terminations, last_wait, "ended by SIGKILL"):
            termination.settle_outcome(
                "still alive after SIGKILL: a call in the kernel does not return", ended=False
            )
    finally:
        for termination in terminations:
            termination.close()
    return terminations


def _await_exits(
    terminations: Collection[Termination], seconds: float, outcome: str
) -> Iterator[Termination]:
    """Wait for all until one common deadline, record those that ended, and yield those that still run."""
    deadline = time.monotonic() + seconds
    left = []
    for termination in terminations:
        if termination.outcome is not None:
            continue
        if termination.wait(deadline - time.monotonic()):
            termination.settle_outcome(outcome, ended=True)
        else:
            left.append(termination)
    yield from left
