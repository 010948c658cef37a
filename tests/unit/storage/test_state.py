"""The accounting's state: what goes on from a stored one gives the snapshots of one that never ended."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.agent_client import report
from tests.support.host.model import GIB
from tests.support.host.one_holder import NOW, START, OneHolder
from tests.support.past import StoredPast, night
from vramledger.accounting.cpu_beside_work import CpuBesideWork
from vramledger.accounting.tracker import BRIDGED, HoldingTracker
from vramledger.errors import RecordingError
from vramledger.model.agent_report import Agent, read_report
from vramledger.model.reading import ProcessFacts, Rank
from vramledger.model.snapshot import Grade, State
from vramledger.storage.moments import recall
from vramledger.storage.objects import ObjectWriter, read_object
from vramledger.views.timeline import Timeline


def copy_of(tracker: HoldingTracker) -> HoldingTracker:
    """Return a tracker that goes on from what another one has stored."""
    written = ObjectWriter(tracker.settings).write({"tracker": tracker.remembered()})
    other = tracker.fresh()
    recall(other, Timeline(), json.loads(json.dumps(written)), other.settings)
    return other


def test_a_stored_state_goes_on_exactly(tmp_path: Path) -> None:
    """After any sample of a busy host the stored state gives the very same snapshots from there on."""
    past = StoredPast(tmp_path / "past", night(25, Random(1)))  # noqa: S311 a simulation
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
    """A state of an earlier or a later version is read, by the names of its fields."""
    host = OneHolder()
    host.watch(5)
    tracker = host.exporter.tracker
    written = ObjectWriter(tracker.settings).write({"tracker": tracker.remembered()})
    text = json.dumps(written).replace('"from_start"', '"later_field"').replace('"_peaks"', '"_later"')
    other = tracker.fresh()
    recall(other, Timeline(), json.loads(text), other.settings)
    host.now += 1
    reading = host.reading()
    assert other.update(reading).devices[0].holdings == tracker.update(reading).devices[0].holdings


def test_cpu_times_keep_their_limits() -> None:
    """A holder's CPU times are as many after a restart as without one, and give the same verdict."""
    before = CpuBesideWork()
    for second in range(200):
        before.update(0.001, 1.0, busy=second % 4 == 0, own=False)
    after = read_object(json.loads(json.dumps(ObjectWriter({}).write(before))), {})
    for second in range(200, 400):
        for each in (before, after):
            each.update(0.001 + (second % 3) * 0.0004, 1.0, busy=second % 4 == 0, own=False)
        assert after == before
    assert (after.quiet.maxlen, after.bursts.maxlen) == (before.quiet.maxlen, before.bursts.maxlen)


@given(st.lists(st.integers(), max_size=5), st.none() | st.integers(0, 5))
def test_a_deque_keeps_its_limit(values: list[int], most: int | None) -> None:
    """Every deque comes back with its items and its limit, or with none if it had none."""
    written = ObjectWriter({}).write({"key": (deque(values, most),)})
    (back,) = read_object(json.loads(json.dumps(written)), {})["key"]
    assert (back, back.maxlen) == (deque(values, most), most)


@pytest.mark.parametrize(
    "raw",
    [
        {"~o": "os.system"},
        {"~o": "accounting.tracker.Counter"},
        {"~o": "accounting.tracker.__builtins__"},
        {"~o": "accounting.holding.HoldingState", "pid": 1},
        {"~e": ["model.snapshot.State", "happy"]},
        {"~m": {"no json": 1}},
        {"~b": "zz"},
        {"~d": [-1, [1]]},
        {"~d": ["many", [1]]},
        {"~d": [10**30, [1]]},
        {"~unknown": [1]},
        {"~a": ["b", [300]]},
    ],
)
def test_a_hostile_state_makes_nothing_else(raw: object) -> None:
    """A text that names anything but the accounting's own classes, or lacks a field, is refused."""
    with pytest.raises(RecordingError):
        read_object(raw, {"most": 1, "idle_after": 1.0})


def test_a_restart_keeps_since_when_a_holder_is_idle() -> None:
    """Who was idle before a restart is idle after it, since the same moment, by inference."""
    host = OneHolder()
    before = host.watch(30)
    assert before.state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.host.restart()
    after = host.holding(after=60.0)
    assert (after.state, after.since, after.grade) == (State.IDLE, before.since, Grade.INFERRED)


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


def test_inferred_quiet_before_a_restart_gets_no_better() -> None:
    """Where the quiet before a restart was only inferred, good evidence begins after the restart."""
    host = OneHolder()
    host.watch(5)
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.host.restart()
    restarted = host.holding(after=60.0)
    assert restarted.grade is not Grade.PROVEN
    after = host.watch(30)
    assert after.grade is Grade.PROVEN
    assert after.since > restarted.since


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


def test_after_a_long_absence_the_quiet_is_not_known() -> None:
    """When nobody has watched for longer than a restart takes, nobody is called idle for that time."""
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    assert host.holding(after=BRIDGED + 1).state is State.ACTIVE


def test_a_gap_in_a_running_exporter_is_not_bridged() -> None:
    """Only a restart is bridged: samples that are missing in between end the quiet, as before."""
    host = OneHolder()
    assert host.watch(30).state is State.IDLE
    assert host.holding(after=60.0).state is State.ACTIVE
    host.exporter.tracker = copy_of(host.exporter.tracker)
    host.sample()
    assert host.holding(after=60.0).state is State.ACTIVE


def test_a_reused_pid_is_not_its_predecessor() -> None:
    """A process that got an idle holder's pid during the restart starts with nothing known of it."""
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
    before = host.sample().devices[0].owner_usage
    host.exporter.tracker = copy_of(host.exporter.tracker)
    after = host.sample(after=60.0).devices[0].owner_usage
    assert before is not None
    assert after is not None
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
    assert after.state is State.IDLE
    assert after.since == before.since + 3600


def test_all_that_the_accounting_knows_is_stored() -> None:
    """Whatever a sample makes the accounting remember is in its state; only settings are not."""
    host = OneHolder()
    before = {name for name in vars(host.exporter.tracker) if name not in host.exporter.tracker.remembered()}
    assert before == {
        *("_idle_after", "_interval", "_longest_gap", "_owners_max", "_blank", "_restarted"),
    }


def test_what_is_proven_stays_proven_where_nothing_is_missing() -> None:
    """A state that is read again for the next sample, as for a look into the past, changes no verdict."""
    host = OneHolder()
    assert host.watch(30).grade is Grade.PROVEN
    other = copy_of(host.exporter.tracker)
    for _ in range(20):
        host.now += 1
        reading = host.reading()
        assert other.update(reading) == host.exporter.tracker.update(reading)
