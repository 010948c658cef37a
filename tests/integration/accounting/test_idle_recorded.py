"""Idleness on real GPUs, and what each program truly did: it wrote that down, by the sampler's clock.

50 programs on one H100 work alone, in pipelines, in turns, and beside a notebook, a server or a training.
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


with gzip.open(HOME / "h100.truth.gz", "rt") as lines:
    TRUTH = {each.pop("pid"): Program(**each) for each in map(json.loads, lines)}
"""What each program did, by pid."""


@cache
def replay(idle_after: float, name: str = "h100") -> dict[int, list[Said]]:
    """Return all that is said of each program of a recording."""
    tracker = HoldingTracker(idle_after=idle_after)
    said: dict[int, list[Said]] = defaultdict(list)
    for reading in read_recording(HOME / f"{name}.jsonl.gz"):
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


FIRST, SECOND = 413, 414
UNTOLD = {419: "spins on the CPU", 420: "loads data, with CPU time that varies"}
IDLE = {
    415: "idle context of torch", 416: "another one", 417: "notebook", 418: "server without GPU work",
    **dict.fromkeys(range(421, 439), "bare context"),
}  # fmt: skip


def test_nobody_of_a_pipeline_is_certainly_idle() -> None:
    """The second program is active; the first one, whom no row names, is never idle above inferred."""
    said = replay(15.0, "pipeline")
    assert not any(map(is_certainly_idle, said[FIRST]))
    assert {each.holding.state for each in said[SECOND]} == {State.ACTIVE}


def test_who_did_nothing_beside_a_pipeline_is_seen_to_be_idle() -> None:
    """The 22 whose CPU time tells are idle, seen; of who spins, or whose time varies, it is inferred."""
    idle = {grade: set[int]() for grade in Grade}
    for pid, everything in replay(15.0, "pipeline").items():
        if everything[-1].holding.state is State.IDLE:
            idle[everything[-1].holding.grade].add(pid)
    assert idle[Grade.SEEN] == IDLE.keys()
    assert idle[Grade.INFERRED] >= UNTOLD.keys(), "they may have launched what the rows do not name"


TURN, PERIOD = 3.0, 18.0
TAKES_TURNS = {1365: 0.0, 1366: TURN}
"""Who works for 3 s in each 18 s of the clock, and from when on."""

IDLE_BESIDE_TURNS = {
    1367: "bare context", 1368: "idle context of torch", 1369: "idle context of JAX",
    1370: "idle context of CuPy", 1371: "notebook",
    1372: "server without requests, which wakes up 20 times a second",
}  # fmt: skip
UNTOLD_BESIDE_TURNS = {1373: "four threads that poll", 1374: "prepares data", 1375: "spins on the CPU"}


@pytest.mark.parametrize("idle_after", [4.0, 6.0, 8.0, 10.0, 12.0, 18.0])
def test_nobody_who_takes_turns_is_certainly_idle_while_it_works(idle_after: float) -> None:
    """Since when one of the two is idle at proven or seen, it has truly not worked."""
    for pid, begun in TAKES_TURNS.items():
        for said in filter(is_certainly_idle, replay(idle_after, "turns")[pid]):
            ended = said.now - (said.now - begun) % PERIOD + TURN  # of its newest turn
            assert said.since > ended - 1.5, (said.now, pid)


def test_whose_cpu_time_is_steady_is_seen_to_be_idle() -> None:
    """Six programs that do nothing are idle, seen, at the end; a program whose CPU time varies is not."""
    programs = TAKES_TURNS.keys() | IDLE_BESIDE_TURNS.keys() | UNTOLD_BESIDE_TURNS.keys()
    everything = [said for pid in programs for said in replay(PERIOD, "turns")[pid]]
    end = max(said.now for said in everything) - 4.0
    before = [said.holding for said in everything if said.now < end]
    assert {each.pid for each in before if each.grade is Grade.SEEN} == IDLE_BESIDE_TURNS.keys()
    idle = {each.pid for each in before if each.state is State.IDLE}
    assert idle >= IDLE_BESIDE_TURNS.keys() | UNTOLD_BESIDE_TURNS.keys()
