"""An orphan that works differs from one that does not: only the second one wastes memory."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support import builders
from tests.support.builders import GIB
from tests.support.host.one_holder import OneHolder
from tests.support.sure import sure
from vramledger.model.snapshot import Holding, Snapshot, State
from vramledger.views.ledger_json import snapshot_json


def orphaned() -> OneHolder:
    """Return a host whose holder has just lost its owner: it is an orphan from the next sample on."""
    host = OneHolder()
    host.sample()
    host.holder.fates = {"unowned": host.now}
    return host


def wasted_seconds(shot: Snapshot) -> list[float | None]:
    """Return what each owner of the device has wasted."""
    (device,) = shot.devices
    return [each.wasted_byte_seconds for each in sure(device.owner_usage).owners]


def watch_at_work(host: OneHolder, seconds: int) -> Holding:
    """Sample once a second while the holder works."""
    host.program.work = 0.4
    return host.watch(seconds)


def test_an_orphan_that_works_wastes_nothing() -> None:
    """However long it has been an orphan: while it works, it is said to, and nothing is wasted."""
    host = orphaned()
    holding = watch_at_work(host, 60)
    assert holding.state is State.ORPHANED
    assert holding.why.endswith("; it still works on the GPU")
    assert holding.working is True
    assert not holding.wasted
    assert wasted_seconds(host.sample()) == [None]


def test_an_orphan_that_stops_working_wastes_its_memory_from_the_idle_threshold_on() -> None:
    """Quiet by every sample for the threshold, its bytes are wasted, and its owner is charged for that."""
    host = orphaned()
    watch_at_work(host, 5)
    host.program.work = 0.0
    assert host.watch(9).working is True
    holding = host.watch(1)
    assert holding.working is False
    assert holding.wasted
    assert "it has not worked on the GPU for 10 s" in holding.why
    assert wasted_seconds(host.sample(after=2.0)) == [2.0 * (holding.memory or 0)]


def test_an_orphan_of_which_nothing_is_known_wastes_nothing() -> None:
    """Without an answer about work the driver has said nothing against it, however long it is watched."""
    host = orphaned()
    host.say_nothing_of_work()
    holding = host.watch(60)
    assert holding.state is State.ORPHANED
    assert holding.working is None
    assert not holding.wasted
    assert holding.why.endswith("; whether it works on the GPU is not known")


def test_work_of_long_ago_without_evidence_since_is_not_known() -> None:
    """An orphan that worked once, and about which the driver then says nothing, neither works nor wastes."""
    host = orphaned()
    watch_at_work(host, 5)
    host.say_nothing_of_work()
    holding = host.watch(30)
    assert holding.working is None
    assert not holding.wasted


@pytest.mark.parametrize(
    ("state", "working", "wasted", "perhaps"),
    [
        (State.IDLE, None, 0, 10 * GIB),
        (State.IDLE, False, 10 * GIB, 0),
        (State.ORPHANED, None, 0, 10 * GIB),
        (State.ORPHANED, True, 0, 0),
        (State.ORPHANED, False, 10 * GIB, 0),
        (State.ZOMBIE, None, 10 * GIB, 0),
        (State.ACTIVE, None, 0, 0),
    ],
)
def test_what_is_not_known_is_no_zero(state: State, working: bool | None, wasted: int, perhaps: int) -> None:
    """Memory that is perhaps wasted, perhaps not, has a figure of its own."""
    held = replace(builders.holding(7, 10 * GIB, state), working=working)
    one = builders.device(0, [held])
    known = [True] if wasted else [None] if perhaps else [False]
    assert (one.wasted, one.perhaps_wasted) == (wasted, perhaps)
    assert [each.wasted for each in one.holdings] == known
    document: Any = snapshot_json(builders.snapshot(one))
    [device] = document["devices"]
    assert (device["memory"]["wasted"], device["memory"]["perhaps_wasted"]) == (wasted, perhaps)
    assert [each["wasted"] for each in device["holdings"]] == known
