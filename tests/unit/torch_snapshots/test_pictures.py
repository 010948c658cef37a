"""The pictures of a snapshot: segments, lifetimes, and what allocated the bytes."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.real_snapshots import NAMES, read
from tests.support.sure import sure
from tests.support.torch_snapshots import LINEAR, MIB, TORCH, Heap, user
from vramledger_agent.torch_snapshots import html
from vramledger_agent.torch_snapshots.snapshot import parse_snapshot
from vramledger_agent.torch_snapshots.user_lines import (
    BACKWARD,
    FORWARD,
    NATIVE,
    OPTIMIZER,
    OTHER,
    PARAMETERS,
    UNRECORDED,
    Frame,
    category_of,
)


def stack(*frames: tuple[str, str]) -> tuple[Frame, ...]:
    """Return a stack, innermost first; files without a leading slash are PyTorch's."""
    return tuple(Frame(file if file[0] == "/" else f"{TORCH}/{file}", 1, name) for file, name in frames)


TRAIN = ("/home/ann/train.py", "train")
CALL = ("nn/modules/module.py", "_call_impl")


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        ([("optim/adam.py", "_init_group"), ("optim/optimizer.py", "wrapper"), TRAIN], OPTIMIZER),
        ([("nn/functional.py", "relu"), CALL, ("optim/lbfgs.py", "step"), TRAIN], FORWARD),
        ([("nn/modules/module.py", "convert"), ("nn/modules/module.py", "_apply"), TRAIN], PARAMETERS),
        ([("nn/modules/linear.py", "__init__"), ("/home/ann/model.py", "__init__"), TRAIN], PARAMETERS),
        ([("nn/modules/linear.py", "__init__"), ("/home/ann/lazy.py", "forward"), CALL, TRAIN], PARAMETERS),
        ([("/home/ann/model.py", "forward"), CALL, TRAIN], FORWARD),
        ([("autograd/__init__.py", "_make_grads"), ("_tensor.py", "backward"), TRAIN], BACKWARD),
        ([("/home/ann/op.py", "backward"), ("autograd/function.py", "apply")], BACKWARD),
        ([("/home/ann/op.py", "forward"), ("autograd/function.py", "apply"), TRAIN], FORWARD),
        ([("nn/functional.py", "linear"), ("utils/checkpoint.py", "recompute_fn")], FORWARD),
        ([TRAIN], OTHER),
        ([("/home/optim/train.py", "step")], OTHER),
    ],
)
def test_a_stack_tells_what_allocated_it(frames: list[tuple[str, str]], category: str) -> None:
    """The innermost of PyTorch's frames that tells decides, and a user's file name never does."""
    assert category_of(stack(*frames)) == category


def test_no_stack_is_not_a_category() -> None:
    """Memory without a recorded stack is from before the recording; C++ alone is the backward pass."""
    assert category_of(()) == UNRECORDED
    assert category_of((NATIVE,)) == BACKWARD


@pytest.mark.parametrize("name", NAMES)
def test_a_real_training_has_its_parts(name: str, tmp_path: Path) -> None:
    """Of a real training the parameters, the optimizer's two moments and the kept outputs are found."""
    snapshot = read(name, tmp_path)
    sums: dict[str, int] = {}
    for block in snapshot.blocks:
        sums[block.category] = sums.get(block.category, 0) + block.size
    assert 48 * MIB <= sums[PARAMETERS] < 50 * MIB
    assert 96 * MIB <= sums[OPTIMIZER] < 100 * MIB, "two moments of each parameter"
    assert sums[FORWARD] > 50 * MIB
    curves = sure(html.live_bytes(snapshot, 0, key_of=html.by_category))
    assert not curves.timed, "most of the time passed before the first step"
    assert {name for name, _ in curves.bands} >= {PARAMETERS, OPTIMIZER, FORWARD, BACKWARD}
    for name_, values in curves.bands:
        assert values[-1] == sums.get(str(name_), 0), name_


@pytest.mark.parametrize("name", NAMES)
def test_the_map_shows_each_byte_once(name: str, tmp_path: Path) -> None:
    """The parts of the segments add up to what is reserved, those of the blocks to what is live."""
    snapshot = read(name, tmp_path)
    found = sure(html.map_segments(snapshot, 0))

    def size(parts: Any) -> int:  # noqa: ANN401 rows of either kind
        return sum(part.end - part.begin for each in parts for part in each[-1])

    assert size(found.segments) == snapshot.devices[0].reserved
    assert size(found.blocks) == snapshot.devices[0].allocated
    assert found.omitted == 0
    cells = sorted((part.row, part.begin, part.end) for each in found.blocks for part in each[-1])
    apart = [one[0] < other[0] or one[2] <= other[1] for one, other in pairwise(cells)]
    assert all(apart), "no two blocks overlap"
    assert max(row for row, _, _ in cells) < found.rows <= 41


@pytest.mark.parametrize("name", NAMES)
def test_lifetimes_never_overlap(name: str, tmp_path: Path) -> None:
    """No two allocations have the same address at the same time, and those at the end are what lives."""
    snapshot = read(name, tmp_path)
    found = sure(html.map_lifetimes(snapshot, 0))
    assert sum(each.size for each in found.allocations if not each.freed) == snapshot.devices[0].allocated
    by_time = sorted(found.allocations, key=lambda each: each.begin)
    for number, each in enumerate(by_time):
        for other in by_time[number + 1 :]:
            if other.begin >= each.end:
                break
            assert other.offset >= each.offset + each.size or each.offset >= other.offset + other.size
    assert all(each.offset >= 0 and each.offset + each.size <= found.height for each in found.allocations)


def test_a_block_outside_of_its_segment_stays_in_the_picture() -> None:
    """A broken file cannot draw beyond the map."""
    block = {"address": 10 * MIB, "size": 50 * MIB, "state": "active_allocated", "frames": []}
    segment = {"address": 0, "total_size": 20 * MIB, "blocks": [block]}
    found = sure(html.map_segments(parse_snapshot({"segments": [segment]}), 0))
    assert sum(part.end - part.begin for part in found.blocks[0][2]) == 10 * MIB


def test_a_picture_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more allocations than a browser draws, the largest are drawn and the rest is counted."""
    monkeypatch.setattr(html, "SHAPES_MAX", 500)
    heap = Heap()
    for number in range(html.SHAPES_MAX + 7):
        heap.allocate(512 if number % 2 else 1024, LINEAR + user(("a.py", 1, "f")))
    snapshot = parse_snapshot(heap.snapshot())
    segments, lifetimes = html.map_segments(snapshot, 0), html.map_lifetimes(snapshot, 0)
    assert (sure(segments).omitted, sure(lifetimes).omitted) == (7, 7)
    assert "7 smallest allocations are not drawn" in html.snapshot_html(snapshot, "x")


def test_freed_memory_from_before_the_recording_is_drawn() -> None:
    """A free without its allocation shows that something was there from the beginning."""
    heap = Heap()
    old = heap.allocate(MIB, [], recorded=False)
    heap.allocate(MIB, user(("a.py", 1, "f")))
    heap.release(old)
    found = sure(html.map_lifetimes(parse_snapshot(heap.snapshot()), 0))
    (first,) = (each for each in found.allocations if each.freed)
    assert (first.category, first.begin) == (UNRECORDED, 0.0)
