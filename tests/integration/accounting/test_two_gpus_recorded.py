"""Two H100s of one host (driver 580.159.04): shared memory, ranks that wait, ranks that hang.

What the programs, of PyTorch with NCCL and of the CUDA driver, truly did is in the tables below.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.host.model import GIB, MIB
from tests.support.judging import imbalances
from tests.support.sure import sure
from vramledger.accounting.sample import Sample
from vramledger.accounting.tracker import HoldingTracker
from vramledger.accounting.work import busy_without_work as waiting
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Grade, Snapshot, State
from vramledger.sampling.replay import read_recording

HOME = Path(__file__).parents[2] / "recordings" / "two-gpus"
STOPPED_AT, KILLED_AT, CONTINUED_AT = 235.4, 366.0, 378.4
"""When a rank was stopped, the other job was killed, and the stopped rank was continued; monotonic."""
TURNS_SINCE = 59.0
"""When four jobs on both GPUs hung: a rank was stopped, one killed, one left, two waited elsewhere."""

IN_TURNS = {585: "stopped", 587: "killed", 589: "left", 591: "waits elsewhere"}
"""The ranks on the first GPU, by what became of the other rank of their job."""
KERNELS = {
    0: (385.83, "spin-thread spin-all sleep-thread read-host fma-thread fma-block hash-thread".split()),
    1: (386.26, "hash-block chase-warp read-cache shared-block atomics sine-block half-block".split()),
}
"""Kernels that stayed for 5 s each, every 6.2 s, by GPU; when the first one began."""
DECODED = (436.6, 444.6), (459.8, 467.8)
"""When a program decoded H.264 on the second GPU, and JPEG pictures; monotonic."""


class Replayed(NamedTuple):
    """The readings of a recording and what they publish."""

    readings: Sequence[Reading]
    snapshots: Sequence[Snapshot]

    def at(self, monotonic: float) -> Snapshot:
        """Return the newest snapshot of a moment."""
        return self.snapshots[bisect_right(self.readings, monotonic, key=lambda each: each.monotonic) - 1]


@cache
def replay(name: str, idle_after: float = 600.0) -> Replayed:
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
    "an exported pool, importers of two users, creator killed": Look(158.0, {(0, 902): 3.0}, 876, (891, 902)),
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


NAMED = {name: look for name, look in LOOKS.items() if look.creator}


@pytest.mark.parametrize("look", NAMED.values(), ids=NAMED)
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


def test_ranks_that_wait_in_turns_on_one_gpu_are_all_named() -> None:
    """Four ranks that wait on one GPU, which it runs in turns, and the one on the other GPU, are named."""
    said = busy_without_work("hangs-in-turns")
    assert said.keys() == {*((0, pid) for pid in IN_TURNS), (1, 592)}
    assert all(since - TURNS_SINCE == pytest.approx(0, abs=2) for times in said.values() for since in times)


def test_ranks_that_wait_in_turns_are_named_in_each_sample() -> None:
    """From two minutes after the hang until a job goes on, no sample leaves out a rank that waits."""
    readings, snapshots = replay("hangs-in-turns", 30.0)
    for reading, snapshot in zip(readings, snapshots, strict=True):
        if TURNS_SINCE + 125 < reading.monotonic < 202:
            named = {each.pid for each in snapshot.devices[0].holdings if each.busy_without_work_since}
            assert named == IN_TURNS.keys()


def test_kernels_that_stay_and_compute_are_not_busy_without_work() -> None:
    """Of 14 kernels that stay for minutes, those that compute or read the host's memory are not named.

    One warp that waits for the cache, and atomics on one line of it, look like a kernel that waits.
    """
    said = set()
    readings = replay("kernels").readings
    for gpu, (begun, names) in KERNELS.items():
        for number, name in enumerate(names):
            start = begun + 6.2 * number
            own = [each for each in readings if start + 1.3 < each.monotonic < start + 5]
            spans: dict[str, waiting.Span] = {}
            for second in range(200):
                device = own[second % len(own)].devices[gpu]
                sample = Sample(Reading(second + 5e8, second), {}, 5.0, False)
                if waiting.busy_without_work(spans, device, sample) is not None:
                    said.add(name)
    assert said == {"spin-thread", "sleep-thread", "chase-warp", "atomics"}


@pytest.mark.parametrize("idle_after", [4.0, 8.0])
def test_a_program_that_decodes_video_is_not_idle(idle_after: float) -> None:
    """While the decoder works, for which no kernel runs, its program is not idle at proven or seen."""
    readings, snapshots = replay("others", idle_after)
    looks = 0
    for reading, snapshot in zip(readings, snapshots, strict=True):
        if any(begin + 2 < reading.monotonic < end for begin, end in DECODED):
            (each,) = [holding for holding in snapshot.devices[1].holdings if holding.pid == 2192]
            assert each.state is State.ACTIVE or each.grade is Grade.INFERRED, each.why
            looks += 1
    assert looks >= 10


def test_what_a_killed_rank_had_shared_is_named_after_it() -> None:
    """Symmetric memory of a killed rank is named after it; at most 1 % of all bytes are unattributed."""
    device = replay("others").snapshots[-1].devices[1]
    assert [each.pid for each in device.left] == [2194]
    assert 2193 in device.left[0].pids, "the rank on the other GPU, which has it mapped"
    assert sure(device.ledger).unattributed <= 0.01 * device.reading.memory.used  # type: ignore[union-attr]
    assert imbalances(replay("others").snapshots) == []


@pytest.mark.parametrize("name", ["waits", "long-waits"])
def test_healthy_ranks_are_not_said_to_hang(name: str) -> None:
    """Ranks wait up to 33 s for a checkpoint, an evaluation, data or a request, and not for minutes."""
    assert busy_without_work(name) == {}


@pytest.mark.parametrize(("name", "longest"), [("waits", 20.0), ("long-waits", 40.0)])
def test_a_rank_that_waits_is_never_idle(name: str, longest: float) -> None:
    """No rank of a healthy job is idle, at any threshold above its waits, at any grade."""
    states = {
        each.state
        for snapshot in replay(name, longest).snapshots
        for device in snapshot.devices
        for each in device.holdings
    }
    assert states == {State.ACTIVE}
