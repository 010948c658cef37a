"""Two programs that take turns on an H100 beside programs that do nothing (driver 580.159.04).

In each 18 s of the clock the first one works for 3 s, then the second one for 3 s, then nobody. Beside them
PyTorch, CuPy, JAX and a bare context do nothing, and do so in the ways in which real programs do.
"""

from pathlib import Path

from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Grade, State
from vramledger.sampling.replay import read_recording

RECORDING = Path(__file__).parents[2] / "recordings" / "idleness" / "turns.jsonl.gz"
PERIOD, TURN = 18.0, 3.0
IDLE_AFTER = 18.0
FIRST, SECOND = 1365, 1366
IDLE = {
    1367: "bare context", 1368: "idle context of torch", 1369: "idle context of JAX",
    1370: "idle context of CuPy", 1371: "notebook",
    1372: "server without requests, which wakes up 20 times a second",
}  # fmt: skip
UNTOLD = {1373: "four threads that poll", 1374: "prepares data", 1375: "spins on the CPU"}


def replay(idle_after: float) -> list[tuple[float, int, State, Grade, float]]:
    """Return the time, pid, state, grade and beginning, by the monotonic clock, of all that is said."""
    tracker = HoldingTracker(idle_after=idle_after)
    return [
        (reading.monotonic, each.pid, each.state, each.grade, each.since - reading.time + reading.monotonic)
        for reading in read_recording(RECORDING)
        for each in tracker.update(reading).devices[1].holdings
    ]


def test_nobody_who_takes_turns_is_certainly_idle_while_it_works() -> None:
    """At each threshold, since when one of the two is idle at proven or seen, it has truly not worked."""
    for idle_after in (4.0, 6.0, 8.0, 10.0, 12.0, 18.0):
        for now, pid, state, grade, since in replay(idle_after):
            if pid in (FIRST, SECOND) and state is State.IDLE and grade is not Grade.INFERRED:
                begin = 0.0 if pid == FIRST else TURN
                ended = now - (now - begin) % PERIOD + TURN  # of its newest turn
                assert since > ended - 1.5, (idle_after, now, pid)


def test_whose_cpu_time_is_steady_is_seen_to_be_idle() -> None:
    """Six programs that do nothing are idle, seen, at the end; a program whose CPU time varies is not."""
    said = replay(IDLE_AFTER)
    end = max(now for now, *_ in said) - 4.0
    seen = {pid for now, pid, state, grade, _ in said if now < end and grade is Grade.SEEN}
    assert seen == IDLE.keys()
    idle = {pid for now, pid, state, *_ in said if now < end and state is State.IDLE}
    assert idle >= IDLE.keys() | UNTOLD.keys()
