"""Idleness on real GPUs, and what each program truly did.

Of 50 programs on one H100 each wrote down when it worked, by the sampler's clock: ten kinds of work alone;
16 programs with small work, pipelines and idle ones; a notebook alone and beside a server; 25 programs with a
training; the same without the training. In two other recordings a pipeline of two programs works, and two
programs take turns.
"""

import gzip
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.sure import sure
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Grade, Holding, State
from vramledger.sampling.replay import read_recording

HOME = Path(__file__).parents[2] / "recordings" / "idleness"
LATE = 4.0
"""Seconds after which work must be noticed: the driver names the process within 3 s."""


class Program(NamedTuple):
    """What a program did: monotonic times of its readiness, and of the beginning and end of each work."""

    name: str
    ready: float | None
    work: list[tuple[float, float]]


class Said(NamedTuple):
    """What was said of a holder at a moment; ``since`` is monotonic too."""

    now: float
    since: float
    holding: Holding


def truth() -> dict[int, Program]:
    """Return what each program did, by pid."""
    with gzip.open(HOME / "h100.truth.gz", "rt") as lines:
        read = [json.loads(line) for line in lines]
    return {each["pid"]: Program(each["name"], each["ready"], each["work"]) for each in read}


TRUTH = truth()


@cache
def replay(idle_after: float) -> dict[int, list[Said]]:
    """Return all that is said of each program."""
    tracker = HoldingTracker(idle_after=idle_after)
    said: dict[int, list[Said]] = defaultdict(list)
    for reading in read_recording(HOME / "h100.jsonl.gz"):
        for device in tracker.update(reading).devices:
            for each in device.holdings:
                since = reading.monotonic - (reading.time - each.since)
                said[each.pid].append(Said(reading.monotonic, since, each))
    return said


def is_certainly_idle(said: Said) -> bool:
    """Tell whether somebody may act on what is said."""
    return said.holding.state is State.IDLE and said.holding.grade is not Grade.INFERRED


@pytest.mark.repeats(kept=2)
@pytest.mark.parametrize("idle_after", [15.0, 25.0, 8.0, 40.0, 60.0])
def test_nobody_who_worked_is_idle_above_inferred(idle_after: float) -> None:
    """Since when a holder is idle at proven or seen, it has truly not worked."""
    false = [
        (TRUTH[pid].name, said.now, said.since, said.holding.why)
        for pid, everything in replay(idle_after).items()
        for said in everything
        if is_certainly_idle(said) and pid in TRUTH
        for begin, end in TRUTH[pid].work
        if end > said.since + 1.0 and begin < said.now - LATE
    ]
    assert false == []


@pytest.mark.parametrize("idle_after", [15.0, 25.0])
def test_a_notebook_alone_is_proven_idle_in_time(idle_after: float) -> None:
    """Within the threshold and 30 s of its last work it is idle, and that is proven."""
    (pid,) = (pid for pid, program in TRUTH.items() if program.name == "n-notebook")
    proven = [
        said.now
        for said in replay(idle_after)[pid]
        if said.holding.grade is Grade.PROVEN and is_certainly_idle(said)
    ]
    assert proven[0] - sure(TRUTH[pid].ready) < idle_after + 30.0


def test_those_who_do_nothing_are_idle_at_some_grade() -> None:
    """Each program that did nothing for the threshold is idle, also on the busy GPU."""
    said = replay(40.0)
    nothing = [pid for pid, program in TRUTH.items() if not program.work and program.name.startswith("b-")]
    assert len(nothing) >= 5
    for pid in nothing:
        assert any(each.holding.state is State.IDLE for each in said[pid]), TRUTH[pid].name


RECORDING = Path(__file__).parents[2] / "recordings" / "idleness" / "pipeline.jsonl.gz"
IDLE_AFTER = 15.0
FIRST, SECOND = 413, 414
UNTOLD = {419: "spins on the CPU", 420: "loads data, with CPU time that varies"}
IDLE = {
    415: "idle context of torch", 416: "another one", 417: "notebook", 418: "server without GPU work",
    **dict.fromkeys(range(421, 439), "bare context"),
}  # fmt: skip


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


TURN, PERIOD = 3.0, 18.0
TAKES_TURNS = {1365: 0.0, 1366: TURN}
"""Who works for 3 s in each 18 s of the clock, and from when on."""

IDLE_BESIDE_TURNS = {
    1367: "bare context", 1368: "idle context of torch", 1369: "idle context of JAX",
    1370: "idle context of CuPy", 1371: "notebook",
    1372: "server without requests, which wakes up 20 times a second",
}  # fmt: skip
UNTOLD_BESIDE_TURNS = {1373: "four threads that poll", 1374: "prepares data", 1375: "spins on the CPU"}


def said_of_turns(idle_after: float) -> list[tuple[int, Said]]:
    """Return all that is said of the programs that take turns on an H100, and of those beside them."""
    tracker = HoldingTracker(idle_after=idle_after)
    return [
        (each.pid, Said(reading.monotonic, each.since - reading.time + reading.monotonic, each))
        for reading in read_recording(HOME / "turns.jsonl.gz")
        for each in tracker.update(reading).devices[1].holdings
    ]


@pytest.mark.parametrize("idle_after", [4.0, 6.0, 8.0, 10.0, 12.0, 18.0])
def test_nobody_who_takes_turns_is_certainly_idle_while_it_works(idle_after: float) -> None:
    """Since when one of the two is idle at proven or seen, it has truly not worked."""
    for pid, said in said_of_turns(idle_after):
        if pid in TAKES_TURNS and is_certainly_idle(said):
            ended = said.now - (said.now - TAKES_TURNS[pid]) % PERIOD + TURN  # of its newest turn
            assert said.since > ended - 1.5, (said.now, pid)


def test_whose_cpu_time_is_steady_is_seen_to_be_idle() -> None:
    """Six programs that do nothing are idle, seen, at the end; a program whose CPU time varies is not."""
    everything = said_of_turns(PERIOD)
    end = max(said.now for _, said in everything) - 4.0
    before = [(pid, said.holding) for pid, said in everything if said.now < end]
    assert {pid for pid, each in before if each.grade is Grade.SEEN} == IDLE_BESIDE_TURNS.keys()
    idle = {pid for pid, each in before if each.state is State.IDLE}
    assert idle >= IDLE_BESIDE_TURNS.keys() | UNTOLD_BESIDE_TURNS.keys()
