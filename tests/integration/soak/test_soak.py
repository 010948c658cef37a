"""A short, seeded run of every part of the soak: the long ones are ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.soak import attacks, endurance, faults, replay, trials
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn


@pytest.mark.repeats
@pytest.mark.parametrize("seed", [1, 2])
def test_a_page_is_true_whatever_the_driver_answers(tmp_path: Path, seed: int) -> None:
    """Fifteen thousand errors, garbage answers and losses: every page matches the host's true state."""
    tally = faults.inject(tmp_path, faults=15_000, seed=seed)
    assert tally.injected >= 15_000
    assert len(tally.faults) > 5
    assert tally.steps > 300


def test_a_page_that_is_not_true_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run finds errors: with a driver module that accepts every temperature, it fails."""
    monkeypatch.setattr("vramledger.readers.nvml.process_lists._LAST_PID", 2**40)
    monkeypatch.setattr("vramledger.readers.nvml.process_lists.MAX_BYTES", 2**70)
    with pytest.raises(faults.ViolationError, match="lists"):
        faults.inject(tmp_path, faults=40_000, seed=1)


def test_an_exporter_recovers_from_what_breaks_around_it(tmp_path: Path) -> None:
    """Samplers that die, calls that hang, GPUs that swap, clocks that step: pages stay right, all recover."""
    chosen = [trial for trial in trials.TRIALS if trial.after <= 4.0 and trial.lasts[1] <= 4.0]
    rows = list(trials.run(tmp_path, rounds=1, seed=4, trials=tuple(chosen)))
    assert len(rows) == len(chosen) + 1


@pytest.mark.thorough
def test_no_user_of_the_host_stops_it(tmp_path: Path) -> None:
    """While strangers attack it, a kind at a time, scrapes are answered and what is sampled is stored."""
    require_root()
    rows = list(attacks.run(tmp_path, seconds=1.0))
    assert [row for row in rows if not row.good] == []
    assert len(rows) > 10


def test_a_recorded_time_is_counted_as_it_was(tmp_path: Path) -> None:
    """On every page byte-seconds, idleness and the 15 minutes match the recording, after seconds."""
    recording = tmp_path / "day.jsonl.gz"
    truth = replay.record(recording, hours=0.3, seed=3)
    found = replay.play(recording, truth, hours=0.3, speed=600, pause=0.1)
    assert [row for row in found.rows() if row.good is False] == []
    assert len(found.looks) > 3
    assert found.steps == 2 * replay.HISTORY_STEPS
    assert {word % 2 for states in truth.idle for word in states} == {0, 1}


def test_another_recording_is_not_taken_for_it(tmp_path: Path) -> None:
    """The run finds errors: compared with another recording, every figure is wrong."""
    recording = tmp_path / "day.jsonl.gz"
    replay.record(recording, hours=0.1, seed=3)
    other = replay.record(tmp_path / "other.jsonl.gz", hours=0.1, seed=4)
    found = replay.play(recording, other, hours=0.1, speed=600, pause=0.1)
    assert found.drift > 1e-3
    assert found.misjudged > 0
    assert found.wrong > 0


def test_growth_is_told_from_noise() -> None:
    """The line fit distinguishes a rise from noise, and from a value that has settled."""
    times = [float(second) for second in range(1000)]
    assert not endurance.slope(times, [1e6 + 100 * second for second in times]).flat
    assert endurance.slope(times, [1e6 + 1000 * (second % 7) for second in times]).flat
    assert endurance.slope(times, [1e6 for _ in times]).flat
    with pytest.raises(ValueError, match="too few to judge"):
        endurance.slope(times[:9], times[:9])


def test_chaos_is_what_was_asked_for(standin_here: StandIn) -> None:
    """The given share of calls fails, and none if the share is 0; a seed gives the same run again."""
    import pynvml  # noqa: PLC0415 - not before the stand-in is its library

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)

    def outcome() -> list[int]:
        found = []
        for _ in range(200):
            try:
                found.append(int(pynvml.nvmlDeviceGetPowerUsage(handle)))
            except pynvml.NVMLError as error:
                found.append(-int(error.value))
        return found

    standin_here.chaos(codes=[999, 15], fail=0.3, spoil=0.3, seed=7)
    first = outcome()
    standin_here.chaos(codes=[999, 15], fail=0.3, spoil=0.3, seed=7)
    assert outcome() == first
    assert {value for value in first if value < 0} == {-999, -15}
    assert 20 < sum(value > 10**6 for value in first) < 100
    standin_here.chaos()
    assert set(outcome()) == {76_000}
    pynvml.nvmlShutdown()
