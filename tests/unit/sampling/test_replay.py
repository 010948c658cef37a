"""Replays: one pass after the other, each as if it happened now for the first time."""

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.host.model import GIB
from tests.support.sure import sure
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.agent_report import Agent
from vramledger.model.reading import (
    DeviceReading,
    DriverWait,
    HiddenHolder,
    MemoryReading,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
    encode,
)
from vramledger.model.snapshot import Snapshot, State
from vramledger.sampling.replay import END_PAUSE, Replay, encode_header
from vramledger.serving.source import snapshots
from vramledger.views.timeline import Timeline

BOOT = 1_700_000_000.0
AGE = 40.0
"""Seconds for which the process of the recording had run when it began."""


def reading(second: float) -> Reading:
    """Make the readings of a process, its agent and a hidden holder, this long after the beginning."""
    start, now = 100_000, 1000.0 + AGE + second
    memory = MemoryReading(8 * GIB, 5 * GIB, 3 * GIB, 0)
    device = DeviceReading(0, "GPU-0", minor=0, memory=memory, processes=(ProcessEntry(7, GIB, "C"),))
    facts = ProcessFacts(7, start, uid=1, parent=ParentFacts(6, start - 5, "bash", "bash", init=False))
    return Reading(
        time=BOOT + now, monotonic=now, boot_time=BOOT, boot_id="b", host_pid_namespace=True,
        devices=(device,), rows=(ProcessRow(7, start, "S", 6, 7, 7, 0, 1),), facts=() if second else (facts,),
        hidden=(HiddenHolder(9, start, "cuda", "x", None, (0,)),),
        agents=(Agent(7, start, 1, BOOT + now, "silent", None),),
    )  # fmt: skip


@pytest.fixture
def film(tmp_path: Path) -> Path:
    """Write a recording of 100 seconds."""
    path = tmp_path / "film.jsonl"
    path.write_bytes(encode_header() + b"".join(encode(reading(second)) for second in range(0, 100, 2)))
    return path


def play(film: Path, count: int) -> tuple[list[Snapshot], list[dict[str, float]]]:
    """Return snapshots of a fast replay, and at each how long growth is known for, by pid."""
    shots: list[Snapshot] = []
    known: list[dict[str, float]] = []
    timeline = Timeline()

    async def run() -> None:
        tracker = HoldingTracker(idle_after=30.0, source="replay")
        async with aclosing(snapshots(Replay(film, 1e6), tracker)) as played:  # type: ignore[type-var]
            async for shot in played:
                timeline.record(shot)
                shots.append(shot)
                known.append({str(key[1]): grown.seconds for key, grown in timeline.growth(shot).items()})
                if len(shots) == count:
                    return

    asyncio.run(asyncio.wait_for(run(), 60))
    return shots, known


def test_each_pass_begins_afresh(film: Path) -> None:
    """In the second pass a process was just seen: no fact about it is older than the process."""
    shots, known = play(film, 60)
    first, second = shots[0], shots[50]
    ages = [shot.time - shot.processes[7].start_time for shot in (first, second) if shot.time is not None]
    assert ages == [pytest.approx(AGE, abs=0.02)] * 2
    assert known[49] == {"7": pytest.approx(98)}
    assert known[50] == {}, "steady for longer than it has run"
    for shot in shots[50:]:
        (held,) = shot.devices[0].holdings
        assert second.processes[7].start_time - 0.02 <= sure(held.since)
        assert held.quiet_since is None or held.quiet_since >= (second.time or 0) - 0.02


def test_each_pass_is_of_other_processes(film: Path) -> None:
    """A process of the second pass started later than that of the first; its agent is joined to it."""
    shots, _ = play(film, 51)
    first, second = shots[0].processes[7], shots[50].processes[7]
    assert second.pid == first.pid
    facts = sure(second.facts)
    assert facts.start > sure(first.facts).start
    assert second.start_time > first.start_time
    assert [shot.agents[7].problem for shot in (shots[0], shots[50])] == ["silent", "silent"]
    (hidden,) = shots[50].devices[0].hidden or ()
    assert hidden.start == facts.start


def test_each_pass_knows_whom_the_facts_are_about(tmp_path: Path) -> None:
    """A process that is stuck is so in every pass."""
    path = tmp_path / "film.jsonl"
    waits = (DriverWait(7, 100_000, 7, "rpcSendMessage", 90.0),)
    lines = [encode(replace(reading(second), waits=waits)) for second in range(0, 100, 2)]
    path.write_bytes(encode_header() + b"".join(lines))
    shots, _ = play(path, 100)
    assert [shot.devices[0].holdings[0].state for shot in (shots[49], shots[99])] == [State.STUCK] * 2


def test_time_begins_now_and_never_goes_back(film: Path) -> None:
    """The first reading has the time at which it is shown; each pass follows the one before."""
    before = time.time()
    shots, _ = play(film, 101)
    times = [shot.time for shot in shots if shot.time is not None]
    assert len(times) == 101
    assert before - 0.1 <= times[0] <= time.time()
    assert times == sorted(times)
    assert times[50] - times[49] == pytest.approx(END_PAUSE)
    assert times[100] - times[99] == pytest.approx(END_PAUSE)


def test_what_is_skipped_has_just_passed(film: Path) -> None:
    """The readings before the start come at once, with times before now; a second run skips nothing."""

    async def run() -> list[float]:
        found: list[float] = []
        async with aclosing(Replay(film, 1e6, skip=40.0).readings()) as played:  # type: ignore[type-var]
            async for each in played:
                found += [] if each is None else [each.time]
                if len(found) == 60:
                    break
        return found

    before = time.time()
    times = asyncio.run(run())
    assert before <= times[20] <= time.time()
    assert times[0] == pytest.approx(times[20] - 40)
    assert times == sorted(times)
    assert times[50] - times[49] == pytest.approx(END_PAUSE)


@pytest.mark.parametrize(("simulated", "name"), [(False, "film.jsonl"), (True, "film.jsonl (simulated)")])
def test_what_is_simulated_says_so(tmp_path: Path, name: str, *, simulated: bool) -> None:
    """The name in log, metrics and page distinguishes a simulation from a recording."""
    path = tmp_path / "film.jsonl"
    path.write_bytes(encode_header("made up", 5.0, simulated=simulated) + encode(reading(0)))
    replay = Replay(path, 1.0)
    assert (replay.name, replay.idle_after) == (name, 5.0)
