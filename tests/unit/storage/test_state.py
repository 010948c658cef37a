"""The accounting's state: what goes on from a stored one gives the snapshots of one that never ended."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from tests.support import judging
from tests.support.agent_client import report
from tests.support.host.model import GIB
from tests.support.host.one_holder import NOW, START, OneHolder
from tests.support.past import StoredPast, night
from tests.support.sure import sure
from vramledger.accounting.remembered import follow_clock
from vramledger.accounting.tracker import BRIDGED, HoldingTracker
from vramledger.accounting.work.thread_times import CpuBesideWork
from vramledger.errors import RecordingError
from vramledger.model.agent_report import Agent, read_report
from vramledger.model.reading import ProcessFacts, Rank
from vramledger.model.snapshot import Grade, State
from vramledger.sampling.replay import read_recording
from vramledger.storage.state import VERSION, recall, write_state
from vramledger.views.timeline import Timeline

ENTRIES = judging.load()
SINCE_1970 = 1.7e9


def stored(tracker: HoldingTracker, timeline: Timeline | None = None) -> Any:  # noqa: ANN401 JSON values
    """Return the state of a tracker as it comes back from a disk."""
    return json.loads(json.dumps(write_state(tracker, timeline or Timeline())))


def copy_of(tracker: HoldingTracker) -> HoldingTracker:
    """Return a tracker that goes on from what another one has stored."""
    other = tracker.fresh()
    recall(other, Timeline(), stored(tracker))
    return other


@pytest.mark.repeats(kept=14)  # of every kind: they are sorted by it
@pytest.mark.parametrize(
    "entry", [entry for first in range(5) for entry in ENTRIES[first::5]], ids=lambda entry: entry.name
)
def test_a_restart_in_every_recording_loses_nothing(entry: judging.Entry) -> None:
    """Whoever goes on from the stored state publishes what one does that goes on from the state itself."""
    readings = list(read_recording(judging.HOME / entry.file))
    cut = len(readings) // 2
    tracker = HoldingTracker(idle_after=entry.idle_after, interval=entry.interval)
    timeline = Timeline()
    for reading in readings[:cut]:
        timeline.record(tracker.update(reading))
    restarted, continued, seen = tracker.fresh(), tracker.fresh(), Timeline()
    recall(restarted, seen, stored(tracker, timeline))
    continued.recall(tracker.state)
    for reading in readings[cut:]:
        after, expected = restarted.update(reading), continued.update(reading)
        seen.record(after)
        timeline.record(expected)
        assert after == expected
        assert judging.golden(after) == judging.golden(expected)
        assert seen.growth(after) == timeline.growth(expected)
    assert seen.history() == timeline.history()


def test_a_stored_state_goes_on_exactly(tmp_path: Path) -> None:
    """After any sample of a busy host the stored state gives the very same snapshots from there on."""
    past = StoredPast(tmp_path / "past", night(10, Random(1)))  # noqa: S311 a simulation
    past.watch(150)
    for _ in range(5):
        other = copy_of(past.tracker)
        for _ in range(20):
            reading = past.reading()
            assert other.update(reading) == past.tracker.update(reading)
            past.now += 1.0


def test_a_reported_rank_outlives_the_exporter() -> None:
    """A rank that was reported is known after a restart, when its process is stopped and cannot report."""
    host = OneHolder()
    told = read_report(report(rank={"number": 3, "size": 8, "job": "n0:31000"}))
    facts = (ProcessFacts(7, START, uid=1000, user="ann"),)
    host.sample(facts=facts, agents=(Agent(7, START, 1000, NOW, problem="", report=told),))
    other = copy_of(host.exporter.tracker)
    host.now += 1
    assert other.update(host.reading()).processes[7].rank == Rank(3, 8, "n0:31000")


def test_a_field_that_an_earlier_version_lacks_keeps_its_default() -> None:
    """Of the same version of the state a field may be missing or new: it is read by the names of fields."""
    host = OneHolder()
    host.watch(5)
    tracker = host.exporter.tracker
    text = json.dumps(stored(tracker)).replace('"from_start"', '"later_field"').replace('"peaks"', '"later"')
    other = tracker.fresh()
    recall(other, Timeline(), json.loads(text))
    host.now += 1
    reading = host.reading()
    assert other.update(reading).devices[0].holdings == tracker.update(reading).devices[0].holdings


def test_cpu_times_keep_their_limits() -> None:
    """A holder's CPU times are as many after a restart as without one, and give the same verdict."""
    before = CpuBesideWork()
    for second in range(200):
        before.update(0.001, 1.0, busy=second % 4 == 0, own=False)
    after = msgspec.json.decode(msgspec.json.encode(before), type=CpuBesideWork)
    for second in range(200, 400):
        for each in (before, after):
            each.update(0.001 + (second % 3) * 0.0004, 1.0, busy=second % 4 == 0, own=False)
        assert after == before


@pytest.mark.parametrize(
    "state",
    [
        None, [], {}, {"tracker": {}, "timeline": {}}, {"~o": "os.system"},
        {"version": VERSION + 1, "tracker": {}, "timeline": {}},
        {"version": VERSION, "tracker": {}},
        {"version": VERSION, "tracker": {"serial": "many"}, "timeline": {}},
        {"version": VERSION, "tracker": {"holdings": {"known": {"GPU-0": {"7": {"pid": 7}}}}},
         "timeline": {}},
        {"version": VERSION, "tracker": {}, "timeline": {"devices": {"GPU-0": {"1": "no base64"}}}},
    ],
)  # fmt: skip
def test_a_state_that_is_not_of_this_version_is_refused_in_one_line(state: object) -> None:
    """What another version has written, or nobody, is refused, and the accounting stays as it was."""
    tracker = HoldingTracker(idle_after=1.0)
    with pytest.raises(RecordingError) as refused:
        recall(tracker, Timeline(), state)
    assert "\n" not in str(refused.value)
    assert tracker.state == HoldingTracker(idle_after=1.0).state


def unix_times(value: object, place: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in JSON values that can only be Unix times, with their place."""
    if isinstance(value, float) and abs(value - SINCE_1970) < 86400:
        yield place, value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from unix_times(each, f"{place}.{name}")
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from unix_times(each, f"{place}.{number}")


def test_every_remembered_time_follows_a_clock_that_is_set(tmp_path: Path) -> None:
    """All Unix times move by as much, whichever step remembers them."""
    past = StoredPast(tmp_path / "past", night(10, Random(1)))  # noqa: S311 a simulation
    for _ in range(150):
        reading = past.reading()
        now, boot = reading.time + SINCE_1970, reading.boot_time + SINCE_1970
        past.tracker.update(replace(reading, time=now, boot_time=boot))
        past.now += 1.0
    before = dict(unix_times(stored(past.tracker)["tracker"]))
    past.tracker.recall(follow_clock(past.tracker.state, 3600.0))
    state = stored(past.tracker)["tracker"]
    after = {place: _at(state, place) for place in before}
    kept = {place for place in before if after[place] == before[place]}
    assert kept == {".boot_time"}, "which the next sample replaces"
    assert all(after[place] == before[place] + 3600.0 for place in before.keys() - kept)
    moved = {part for place in before.keys() - kept for part in place.split(".")}
    assert moved >= {"watched_since", "began", "holdings", "work", "start_time"}


def _at(value: Any, place: str) -> Any:  # noqa: ANN401 JSON values
    for part in place.split(".")[1:]:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def test_a_restart_keeps_since_when_a_holder_is_idle() -> None:
    """Idle since the same moment, by inference; good evidence begins after the restart."""
    host = OneHolder()
    before = host.watch(30)
    assert before.state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.host.restart()
    after = host.holding(after=60.0)
    assert (after.state, after.since, after.grade) == (State.IDLE, before.since, Grade.INFERRED)
    host = OneHolder()
    host.watch(5)
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.host.restart()
    restarted = host.holding(after=60.0)
    assert restarted.grade is not Grade.PROVEN
    after = host.watch(30)
    assert after.grade is Grade.PROVEN
    assert after.since > restarted.since


def test_who_is_idle_on_both_sides_of_restarts_is_idle_since_before() -> None:
    """Good evidence before and after a restart makes one time, of the grade seen, until work ends it."""
    host = OneHolder()
    before = host.watch(30)
    assert before.grade is Grade.PROVEN
    for _ in range(3):
        host.exporter.tracker = copy_of(host.exporter.tracker)
        host.host.restart()
        host.holding(after=60.0)
        host.holding()
    after = host.watch(30)
    assert (after.state, after.since, after.grade) == (State.IDLE, before.since, Grade.SEEN)
    assert "restart" in after.why
    host.program.work = 0.5
    assert host.holding().state is State.ACTIVE
    host.program.work = 0.0
    ended = host.now
    after = host.watch(30)
    assert (after.state, after.grade) == (State.IDLE, Grade.PROVEN)
    assert after.since > NOW + ended - 5


@pytest.mark.parametrize("seen", ["work", "bytes"])
def test_work_during_a_restart_ends_idleness(seen: str) -> None:
    """A holder whose bytes or rows have changed while nobody watched is not idle."""
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    if seen == "work":
        host.program.work = 0.5
    else:
        host.program.memory += GIB
    assert host.holding(after=60.0).state is State.ACTIVE


def test_what_is_not_bridged() -> None:
    """An absence longer than a restart, a gap of a running exporter, and another process with the pid."""
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    assert host.holding(after=BRIDGED + 1).state is State.ACTIVE
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    assert host.holding(after=60.0).state is State.ACTIVE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.sample()
    assert host.holding(after=60.0).state is State.ACTIVE
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.host.restart()
    host.holder.begin = host.now + 5
    host.program.memory = 3 * GIB
    assert host.holding(after=10.0).state is State.ACTIVE


def test_time_that_nobody_watched_is_charged_to_nobody() -> None:
    """Byte-seconds go on from their last value, and the time of the restart counts as unaccounted."""
    host = OneHolder()
    host.watch(30)
    before = sure(host.sample().devices[0].owner_usage)
    host.exporter.tracker = copy_of(host.exporter.tracker)
    after = sure(host.sample(after=60.0).devices[0].owner_usage)
    assert [each.byte_seconds for each in after.owners] == [each.byte_seconds for each in before.owners]
    assert after.uncounted == before.uncounted + 60.0


def test_a_clock_that_was_set_during_a_restart_moves_the_times() -> None:
    """Spans stay what they were when the clock was set while nobody watched."""
    host = OneHolder()
    before = host.watch(30)
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.now += 10
    reading = host.reading()
    moved = replace(reading, time=reading.time + 3600, boot_time=reading.boot_time + 3600)
    (after,) = host.exporter.tracker.update(moved).devices[0].holdings
    assert (after.state, after.since) == (State.IDLE, before.since + 3600)
