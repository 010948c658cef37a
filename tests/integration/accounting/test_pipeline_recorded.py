"""A pipeline of two programs on one H200 beside 24 programs that do nothing on the GPU (driver 580.159.04).

The first program multiplies three matrices every seven seconds, and the second one works at once after it.
The driver names only the second in its rows. Their CPU times are from the same samples.
"""

from pathlib import Path

from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Grade, State
from vramledger.sampling.replay import read_recording

RECORDING = Path(__file__).parents[2] / "recordings" / "idleness" / "pipeline.jsonl.gz"
IDLE_AFTER = 15.0
FIRST, SECOND = 413, 414
UNTOLD = {419: "spins on the CPU", 420: "loads data, with CPU time that varies"}
IDLE = {
    415: "idle context of torch",
    416: "another one",
    417: "notebook",
    418: "server without GPU work",
    **dict.fromkeys(range(421, 439), "bare context"),
}


def graded() -> dict[int, list[tuple[State, Grade]]]:
    """Return state and grade of each program, reading by reading."""
    tracker = HoldingTracker(idle_after=IDLE_AFTER)
    said: dict[int, list[tuple[State, Grade]]] = {}
    for reading in read_recording(RECORDING):
        for device in tracker.update(reading).devices:
            for each in device.holdings:
                said.setdefault(each.pid, []).append((each.state, each.grade))
    return said


def test_nobody_of_a_pipeline_is_certainly_idle() -> None:
    """The second program is active; the first one, whom no row names, is never idle above inferred."""
    said = graded()
    assert (State.IDLE, Grade.SEEN) not in said[FIRST]
    assert (State.IDLE, Grade.PROVEN) not in said[FIRST]
    assert {state for state, _ in said[SECOND]} == {State.ACTIVE}


def test_everybody_who_did_nothing_beside_a_pipeline_is_seen_to_be_idle() -> None:
    """The 22 idle programs whose CPU time tells are idle, seen, at the end."""
    said = graded()
    assert {pid for pid, every in said.items() if every[-1] == (State.IDLE, Grade.SEEN)} == IDLE.keys()


def test_whose_cpu_time_says_nothing_is_not_certainly_idle() -> None:
    """A program that spins, or whose CPU time varies, may have launched what the rows do not name."""
    said = graded()
    for pid in UNTOLD:
        assert said[pid][-1] == (State.IDLE, Grade.INFERRED)
