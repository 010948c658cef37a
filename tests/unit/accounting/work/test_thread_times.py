"""What the times of a holder's threads prove, beside others, and where the driver has no rows."""

from typing import Any

import pytest

from tests.support.host.model import GIB
from tests.unit.accounting.work.test_device_work import Device, idle_with
from vramledger.accounting.sample import forget_ended
from vramledger.accounting.work.thread_times import ThreadQuiet
from vramledger.model.reading import ManagedMappings, ProcessEntry, ProcessRow, Reading, ThreadTimes
from vramledger.model.snapshot import Grade, Holding, State
from vramledger.sampling.replay import shift_starts

IDLE_AFTER = 60.0
LOOK = 10.0
HOLDER, TRAINING = 7, 8
BUSY = {"gpu": 1.0, "memory": 0.3}
HALF = {"gpu": 0.5, "memory": 0.1}
Threads = tuple[float | bool | None, ...]

QUIET: Threads = (0, 0.0, 0, 0.0, 0.0, 0.0, 0)
NOTEBOOK: Threads = (0, 0.0, 31, 0.0023, 1.6e-4, 0.0, 0, True)
"""What the helper threads of an idle ipykernel do in ten seconds, as measured."""


class Card:
    """A GPU without GPM; its holders are one that the test tells, and a training that the driver names."""

    def __init__(self, *, kinds: str = "C") -> None:
        self.device = Device(HOLDER, TRAINING, kinds=kinds)
        self.device.quiet_cpu = {}
        self.kinds, self.looked = kinds, 0.0

    def sample(  # noqa: PLR0913 what a sample may say
        self,
        threads: Threads | None = QUIET,
        *,
        rate: dict[str, float] | None = BUSY,
        rows: tuple[int, ...] | None = (TRAINING,),
        complete: bool = True,
        host: bool = True,
        memory: int = GIB,
    ) -> Holding:
        """Advance, and return the holding; a look at the threads ends every ten seconds."""
        now, looks = self.device.now + 1.0, []
        if threads is not None and now - self.looked >= LOOK:
            looks = [ThreadTimes(HOLDER, 100, self.looked, now - 0.5, complete, *threads)]  # type: ignore[arg-type]
            self.looked = now - 0.5
        held = (ProcessEntry(HOLDER, memory, self.kinds), ProcessEntry(TRAINING, GIB, self.kinds))
        known = {"host_pid_namespace": host, "threads": tuple(looks)}
        named = None if rows is None else [(pid, 0.9) for pid in rows]
        return self.device.sample(named, reading=known, processes=held, utilization=rate)[HOLDER]

    def watch(self, seconds: int, *args: Threads | None, **how: Any) -> Holding:  # noqa: ANN401 as for a sample
        return [self.sample(*args, **how) for _ in range(seconds)][-1]


def test_still_holder_is_proven_idle_beside_a_training() -> None:
    """Without counters, beside a training, once the threshold has passed, and with looks alone."""
    card = Card()
    assert idle_with(card.watch(60)) is not Grade.PROVEN
    holding = card.watch(12)
    assert idle_with(holding) is Grade.PROVEN
    assert holding.working is False
    assert holding.wasted
    assert "no thread of it ran except the driver's, and the driver named it in no row" in holding.why
    assert idle_with(Card().watch(300, None)) is Grade.INFERRED


@pytest.mark.parametrize(
    "threads",
    [
        (1, 0.0005, 0, 0.0, 0.0, 0.0, 0, None),
        (0, 0.0, 3, 0.0015, 0.0005, 0.0001, 0, True),
        (0, 0.0, 14, 0.0022, 0.00016, 0.00008, 0, True),
        (0, 0.0, 0, 0.0, 0.0, 0.0, 1, True),
        (0, 0.0, 10, None, None, None, 0, True),
        (0, 0.0, 10, 0.0008, 0.00008, 0.0, 0, False),
        (0, 0.0, 10, 0.0008, 0.00008, 0.0, 0, None),
    ],
    ids="main worker poll-with-work new-thread no-cpu-time not-python program-not-known".split(),
)
def test_threads_that_may_launch_leave_it_inferred(threads: Threads) -> None:
    """A main thread that runs at all; helpers that run longer than idle ones do; any helper in C."""
    assert idle_with(Card().watch(300, threads)) is Grade.INFERRED


def test_notebooks_helpers_keep_their_rhythm() -> None:
    """The main thread did not run, and the others run by the clock: seen, and never proven."""
    holding = Card().watch(100, NOTEBOOK)
    assert idle_with(holding) is Grade.SEEN
    assert "the others only kept their rhythm" in holding.why


def test_requests_are_no_rhythm() -> None:
    """Helpers that run as short as idle ones, but now more and now less, may serve somebody."""
    card = Card()
    grades = set()
    for turn in range(40):
        runs = (10, 13, 17, 10)[turn % 4]
        grades.add(idle_with(card.watch(10, (0, 0.0, runs, runs * 2e-5, 2e-5, 0.0, 0, True))))
    assert grades == {None, Grade.INFERRED}


def test_work_that_was_launched_before_is_named_by_rows() -> None:
    """A kernel of minutes: its program sleeps, and the driver names it."""
    card = Card()
    card.watch(100, rows=(TRAINING, HOLDER))
    holding = card.sample(rows=(TRAINING, HOLDER))
    assert (holding.state, holding.working) == (State.ACTIVE, True)


@pytest.mark.parametrize(
    ("rate", "expected"),
    [(BUSY, None), (HALF, Grade.SEEN), (None, Grade.SEEN)],
    ids=["always full", "not always full", "no rate: MIG before Hopper"],
)
def test_not_full_without_rows_no_long_kernel(rate: dict[str, float] | None, expected: Grade | None) -> None:
    """Without rows only the rate shows a kernel of minutes; on MIG before Hopper not even that."""
    assert idle_with(Card().watch(100, rows=None, rate=rate)) is expected


@pytest.mark.parametrize(("rate", "expected"), [(BUSY, None), (HALF, Grade.SEEN)])
def test_client_of_mps_is_never_proven_idle(rate: dict[str, float], expected: Grade | None) -> None:
    """The driver names the server in place of its clients, so a row says nothing of this one."""
    assert idle_with(Card(kinds="CM").watch(100, rate=rate, rows=())) is expected


@pytest.mark.parametrize("kinds", ["C", "CM"])
def test_a_rate_that_fails_once_makes_nobody_idle(kinds: str) -> None:
    """Where the driver tells a rate, a sample without it does not exclude a kernel of minutes."""
    card = Card(kinds=kinds)
    card.watch(100, rows=None)
    assert idle_with(card.sample(rows=None, rate=None)) is None
    assert idle_with(card.watch(9, rows=None, rate=None)) is None


def test_a_rate_that_was_never_read_makes_nobody_idle() -> None:
    """A query that fails from the start says no more than one that fails once."""
    card = Card()
    card.device.says = {"failed": ("utilization",)}
    assert idle_with(card.watch(100, rows=None, rate=None)) is None


def test_a_sample_without_rows_ends_the_proof() -> None:
    """A query that failed may have missed the row of a long kernel; it is seen, and later proven again."""
    card = Card()
    assert idle_with(card.watch(100)) is Grade.PROVEN
    card.sample(rows=None)
    assert idle_with(card.sample()) is not Grade.PROVEN
    assert idle_with(card.watch(12, rate=HALF)) is Grade.SEEN
    card.sample(memory=2 * GIB)
    assert idle_with(card.watch(90, memory=2 * GIB)) is Grade.PROVEN


@pytest.mark.parametrize("how", [{"complete": False}, {"host": False}], ids=["hidden", "another namespace"])
def test_what_is_not_known_is_not_quiet(how: dict[str, bool]) -> None:
    """A look that could not read everything, or in another PID namespace, proves nothing."""
    card = Card()
    assert idle_with(card.watch(100)) is Grade.PROVEN
    assert idle_with(card.watch(11, **how)) is not Grade.PROVEN


def test_what_ends_the_proof() -> None:
    """No further looks, a gap until a new look, and at once a change of its bytes."""
    card = Card()
    assert idle_with(card.watch(100)) is Grade.PROVEN
    assert idle_with(card.watch(100, None)) is Grade.INFERRED
    card = Card()
    assert idle_with(card.watch(100)) is Grade.PROVEN
    card.device.now += 30.0
    assert idle_with(card.sample(None)) is not Grade.PROVEN
    card = Card()
    assert idle_with(card.watch(100)) is Grade.PROVEN
    assert card.sample(memory=2 * GIB).state is State.ACTIVE


def test_a_process_that_has_only_the_pid_is_another() -> None:
    """What is known of a process goes with it, also where another one has its pid."""
    known = {7: {70: ThreadQuiet(5.0)}, 8: {80: ThreadQuiet(5.0)}}
    forget_ended(known, lambda pid, start: (pid, start) in {(7, 71), (8, 80)})
    assert {pid: set(starts) for pid, starts in known.items()} == {8: {80}}


def test_a_recording_that_starts_again_has_other_processes_throughout() -> None:
    """Threads and mappings stay those of their holders when a replay gives these later start times."""
    row = ProcessRow(7, 70, "S", 1, 7, 7, 0, 1)
    before = Reading(
        1.0, 1.0, rows=(row,), threads=(ThreadTimes(7, 70, 0.0, 1.0, complete=True),),
        managed=(ManagedMappings(7, 70, None),),
    )  # fmt: skip
    after = shift_starts(before, 10.0)
    assert {each.start for part in (after.rows, after.threads, after.managed) for each in part} == {1070}
