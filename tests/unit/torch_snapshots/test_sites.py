"""Live bytes belong to the line of the user's program that allocated them; a leak is a line that grew."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sure import sure
from tests.support.torch_snapshots import EVALUATE, FORWARD, HEAD, LINEAR, MAIN, STEP, Heap, training, user
from vramledger_agent.protocol.user_code import FRAMEWORK, LIBRARY, OWN, code_origin
from vramledger_agent.torch_snapshots.html import BEFORE, live_bytes
from vramledger_agent.torch_snapshots.sites import compare_snapshots, sum_by_site
from vramledger_agent.torch_snapshots.snapshot import AllocationSnapshot, Block, parse_snapshot
from vramledger_agent.torch_snapshots.user_lines import NATIVE, Frame, common_frame, user_frames

MIB = 2**20


@pytest.mark.parametrize(
    ("filename", "expected"),
    [
        ("/home/ann/train/train.py", OWN),
        ("train.py", OWN),
        ("/tmp/ipykernel_77/123.py", OWN),  # noqa: S108 a notebook's cell
        ("<stdin>", OWN),
        ("/home/ann/torch_experiments/net.py", OWN),
        ("/venv/lib/python3.12/site-packages/transformers/models/llama.py", LIBRARY),
        ("/usr/lib/python3.12/contextlib.py", LIBRARY),
        ("/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py", FRAMEWORK),
        ("/src/pytorch/torch/nn/functional.py", FRAMEWORK),
        ("/tmp/torchinductor_ann/ab/cab.py", FRAMEWORK),  # noqa: S108
        ("<eval_with_key>.12", FRAMEWORK),
        ("??", FRAMEWORK),
        ("/pytorch/aten/src/ATen/native/Linear.cpp", FRAMEWORK),
    ],
)
def test_whose_code(filename: str, expected: int) -> None:
    """The user's code, a library's and the framework's are distinguished by their files."""
    assert code_origin(filename) == expected


def test_library_stands_in() -> None:
    """In a program that consists only of libraries, the libraries' lines count, not the framework's."""
    theirs = Frame("/v/site-packages/torch/nn/x.py", 1, "a")
    library = Frame("/v/site-packages/t/y.py", 2, "b")
    assert user_frames((theirs, library)) == (library,)


def test_bytes_are_booked_on_the_users_line() -> None:
    """Live bytes count for the user's innermost line, the largest first; their sum is the allocator's."""
    snapshot = parse_snapshot(training(5))
    found = sum_by_site(snapshot.blocks)
    assert [(site.frame, site.size, site.blocks) for site in found] == [
        (None, 256 * MIB, 1),
        (Frame(*FORWARD), 40 * MIB, 5),
        (Frame(*HEAD), 30 * MIB, 5),
        (Frame(*EVALUATE), 5 * MIB, 5),
    ]
    assert found[1].callers == (Frame(*EVALUATE), Frame(*MAIN))
    (device,) = snapshot.devices
    assert (device.reserved, device.allocated, device.largest_free) == (363 * MIB, 331 * MIB, 32 * MIB)
    assert sum(site.size for site in found) == device.allocated


def test_leak_is_named() -> None:
    """Memory that a training keeps from its evaluations is growth at those lines; what shrank is none."""
    grown = compare_snapshots(parse_snapshot(training(2)), parse_snapshot(training(10)))
    assert [(each.site.frame, each.size, each.blocks) for each in grown.grown] == [
        (Frame(*FORWARD), 64 * MIB, 8),
        (Frame(*HEAD), 48 * MIB, 8),
        (Frame(*EVALUATE), 8 * MIB, 8),
    ]
    assert grown.through == Frame(*EVALUATE)
    assert (grown.older, grown.after - grown.before) == (0, 120 * MIB)
    same, more = parse_snapshot(training(2)), parse_snapshot(training(3))
    assert compare_snapshots(same, same).grown == ()
    assert compare_snapshots(more, same).grown == ()
    assert compare_snapshots(more, same).through is None


def test_leak_behind_a_shared_layer() -> None:
    """A layer whose memory the training frees and the evaluation keeps is not named: the evaluation is."""

    def run(evaluations: int) -> AllocationSnapshot:
        heap = Heap()
        for _ in range(evaluations):
            for _ in range(10):
                heap.release(heap.allocate(8 * MIB, LINEAR + user(FORWARD, STEP, MAIN)))
            heap.allocate(8 * MIB, LINEAR + user(FORWARD, EVALUATE, MAIN))
            heap.release(heap.allocate(8 * MIB, LINEAR + user(HEAD, EVALUATE, MAIN)))
        return parse_snapshot(heap.snapshot())

    grown = compare_snapshots(run(2), run(10))
    assert (grown.grown[0].site.frame, grown.through) == (Frame(*FORWARD), Frame(*EVALUATE))


def test_growth_outside_of_the_recordings_is_told() -> None:
    """Bytes that were allocated while nothing was recorded have no line, and are listed separately."""
    first, second = Heap(), Heap()
    first.allocate(MIB, [], recorded=False)
    second.allocate(9 * MIB, [], recorded=False)
    grown = compare_snapshots(parse_snapshot(first.snapshot()), parse_snapshot(second.snapshot()))
    assert (grown.grown, grown.older) == ((), 8 * MIB)


def test_shared_needs_a_common_path() -> None:
    """Growth in two unrelated places has only their common caller as its common line."""
    left, right = Frame("a.py", 1, "a"), Frame("b.py", 1, "b")
    main = Frame("main.py", 1, "main")
    assert common_frame([((left, main), 50), ((right, main), 50)]) == main
    assert common_frame([((left,), 50), ((right,), 50)]) is None
    assert common_frame([]) is None


@given(st.lists(st.tuples(st.integers(1, 64), st.booleans()), max_size=40))
def test_course_ends_at_what_lives(steps: list[tuple[int, bool]]) -> None:
    """The picture over time ends at the bytes that live at the end, and never shows less than zero."""
    heap = Heap()
    heap.allocate(100, [], recorded=False)
    held: list[int] = []
    for size, release in steps:
        if release and held:
            heap.release(held.pop(0))
        else:
            held.append(heap.allocate(size, LINEAR + user(STEP if size % 2 else FORWARD)))
    snapshot = parse_snapshot(heap.snapshot())
    told = live_bytes(snapshot, 0)
    assert (told is None) == (not steps)
    if told is None:
        return
    assert sum(values[-1] for _, values in told.bands) == snapshot.devices[0].allocated
    assert all(value >= 0 for _, values in told.bands for value in values)
    assert dict(told.bands)[BEFORE][0] == 100


def test_course_keeps_the_peak() -> None:
    """A peak between two points of the picture is not lost."""
    heap = Heap()
    for _ in range(2000):
        heap.release(heap.allocate(10, user(STEP)))
    heap.release(heap.allocate(5000, user(FORWARD)))
    for _ in range(2000):
        heap.release(heap.allocate(10, user(STEP)))
    told = sure(live_bytes(parse_snapshot(heap.snapshot()), 0))
    assert told.timed
    assert max(dict(told.bands)[Frame(*FORWARD)]) == 5000
    assert len(told.seconds) < 500


def test_what_no_python_line_allocated() -> None:
    """C++ code of the recording has a name of its own, the rest is older; without frames nobody is named."""
    heap = Heap()
    heap.allocate(64 * MIB, [], recorded=False)
    heap.allocate(16 * MIB, user(FORWARD, STEP, MAIN))
    heap.release(heap.allocate(8 * MIB, []))
    heap.allocate(32 * MIB, [])  # a gradient: the thread of a backward pass has no Python frames
    sites = sites_of(parse_snapshot(heap.snapshot()).blocks)
    assert sites == {None: 64 * MIB, NATIVE: 32 * MIB, Frame(*FORWARD): 16 * MIB}
    assert str(NATIVE).startswith("(C++ code")
    heap = Heap()
    native = {"filename": "/src/c10/cuda/CUDACachingAllocator.cpp", "line": 1, "name": "c10::malloc"}
    heap.allocate(32 * MIB, [native])
    assert sites_of(parse_snapshot(heap.snapshot()).blocks) == {NATIVE: 32 * MIB}
    heap = Heap()
    heap.allocate(16 * MIB, [])
    assert sites_of(parse_snapshot(heap.snapshot()).blocks) == {None: 16 * MIB}


def sites_of(blocks: Iterable[Block]) -> dict[Frame | None, int]:
    return {site.frame: site.size for site in sum_by_site(blocks)}
