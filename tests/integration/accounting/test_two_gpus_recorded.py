"""Two H100s of one host (driver 580.159.04): shared memory, ranks that wait, ranks that hang.

The recordings are of real programs: PyTorch with NCCL, and programs that call the CUDA driver. What they
truly did is in the tables below, by the monotonic time of the readings.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.host.model import GIB, MIB
from tests.support.judging import imbalances
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Snapshot, State
from vramledger.sampling.replay import read_recording

HOME = Path(__file__).parents[2] / "recordings" / "two-gpus"


class Replayed(NamedTuple):
    """The readings of a recording and what they publish."""

    readings: Sequence[Reading]
    snapshots: Sequence[Snapshot]

    def at(self, monotonic: float) -> Snapshot:
        """Return the newest snapshot of a moment."""
        return self.snapshots[bisect_right(self.readings, monotonic, key=lambda each: each.monotonic) - 1]


@cache
def replay(name: str, idle_after: float = 600.0) -> Replayed:
    """Replay a recording."""
    tracker = HoldingTracker(idle_after=idle_after)
    readings = list(read_recording(HOME / f"{name}.jsonl.gz"))
    return Replayed(readings, [tracker.update(each) for each in readings])


class Look(NamedTuple):
    """A moment, and the uncharged GiB that each pid truly has on each GPU."""

    at: float
    held: dict[tuple[int, int], float]
    creator: int | None = None
    able: tuple[int, ...] = ()


LOOKS = {
    "cuMemCreate, mapped from the other GPU": Look(129.9, {}),
    "its creator killed": Look(133.5, {}, 783, (800,)),
    "two importers of two users on one GPU, creator killed": Look(144.0, {}),
    "the first importer killed too": Look(147.7, {}),
    "an exported pool, two importers of two users, creator killed": Look(
        158.0, {(0, 902): 3.0}, 876, (891, 902)
    ),
    "the first importer of the pool killed too": Look(161.6, {(0, 902): 3.0}, 876, (902,)),
    "an importer on each GPU, creator killed": Look(171.8, {}, 929, (944, 957)),
    "the importer on the same GPU killed too": Look(175.5, {}, 929, (957,)),
    "CUDA IPC from the other GPU": Look(181.7, {}),
    "memory on the other GPU with peer access": Look(190.4, {}),
    "managed memory on two GPUs": Look(195.9, {(0, 1050): 2.0, (1, 1050): 3.0}),
    "managed memory of two users on two GPUs": Look(
        203.4, {(0, 1082): 2.0, (0, 1099): 1.0, (1, 1082): 1.0, (1, 1099): 3.0}
    ),
    "copies of mostly read managed memory on both": Look(208.8, {(0, 1119): 3.0, (1, 1119): 3.0}),
}


def test_ledgers_of_shared_memory_balance() -> None:
    """While memory is shared between GPUs, both ledgers balance to the byte in every reading."""
    assert imbalances(replay("sharing").snapshots) == []


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_nobody_is_given_what_another_one_has(look: Look) -> None:
    """Nobody is certainly given more than it has, and no range excludes what its holder has."""
    for device in replay("sharing").at(look.at).devices:
        for each in device.holdings:
            has = look.held.get((device.reading.index, each.pid), 0.0) * GIB
            least, most = (0, 0) if each.uncharged is None else each.uncharged[:2]
            assert least <= has + 32 * MIB
            assert most >= has - 32 * MIB


@pytest.mark.parametrize(
    "look",
    [look for look in LOOKS.values() if look.creator],
    ids=[name for name in LOOKS if LOOKS[name].creator],
)
def test_what_a_killed_program_left_is_named(look: Look) -> None:
    """Memory of a killed program is named after it, with the processes of any GPU that can have it."""
    device = replay("sharing").at(look.at).devices[0]
    assert [(each.pid, each.pids) for each in device.left] == [(look.creator, look.able)]


def busy_without_work(name: str) -> dict[tuple[int, int], set[float]]:
    """Return by GPU and pid since when a holder is said to be busy without work, each time."""
    said: dict[tuple[int, int], set[float]] = {}
    readings, snapshots = replay(name, 30.0)
    for reading, snapshot in zip(readings, snapshots, strict=True):
        for device in snapshot.devices:
            for each in device.holdings:
                if each.busy_without_work_since is not None:
                    since = each.busy_without_work_since - reading.time + reading.monotonic
                    said.setdefault((device.reading.index, each.pid), set()).add(round(since))
    return said


STOPPED_AT, KILLED_AT, CONTINUED_AT = 235.4, 366.0, 378.4
"""When a rank was stopped, the other job was killed, and the stopped rank was continued; monotonic."""


def test_a_hang_names_the_ranks_that_wait_and_only_them() -> None:
    """Of two jobs a rank was stopped or stuck in Python: the other two ranks wait for them."""
    said = busy_without_work("hangs")
    assert said.keys() == {(0, 1171), (1, 1179)}
    assert all(since - STOPPED_AT == pytest.approx(0, abs=2) for times in said.values() for since in times)


def test_the_end_of_another_job_on_the_gpu_does_not_hide_a_hang() -> None:
    """A rank goes on to be busy without work, since the same moment, when its neighbour is killed."""
    held = replay("hangs", 30.0).at(KILLED_AT + 10).devices[0].holdings
    before = replay("hangs", 30.0).at(KILLED_AT - 1).devices[0].holdings
    since = {each.pid: each.busy_without_work_since for each in before}
    assert since[1171] is not None
    assert [(each.pid, each.busy_without_work_since) for each in held] == [(1171, since[1171])]


def test_a_hang_that_is_over_is_not_said_any_more() -> None:
    """Within 3 s of the continued rank's work nothing is busy without work."""
    for device in replay("hangs", 30.0).at(CONTINUED_AT + 3).devices:
        assert [each.busy_without_work_since for each in device.holdings] == [None]


def test_healthy_ranks_are_not_said_to_hang() -> None:
    """Ranks wait up to 12 s for a checkpoint, an evaluation, data or a request, and not for minutes."""
    assert busy_without_work("waits") == {}


def test_a_rank_that_waits_is_never_idle() -> None:
    """No rank of a healthy job is idle, at any threshold above its waits, at any grade."""
    states = {
        each.state
        for snapshot in replay("waits", 20.0).snapshots
        for device in snapshot.devices
        for each in device.holdings
    }
    assert states == {State.ACTIVE}
