"""Dividing uncharged bytes among those who can have them: the same question has the same answer."""

import copy

from hypothesis import given
from hypothesis import strategies as st

from tests.support.host.model import GIB
from vramledger.accounting.uncharged.solver import (
    Left,
    MemoryPool,
    PoolHolder,
    Range,
    collect_sources,
    foreign_bytes,
    narrow,
    share_out,
    solve,
    undivided_bytes,
)
from vramledger.model.snapshot import Holding, Ledger, State

_BYTES = st.integers(0, 16).map(lambda count: count * GIB)
_RANGES = st.tuples(_BYTES, _BYTES).map(lambda pair: Range(min(pair), max(pair)))


def _holder(pid: int, bound: int | None) -> PoolHolder:
    holding = Holding(pid, 100, GIB, GIB, "C", State.ACTIVE, 0.0, "")
    return PoolHolder("GPU-0", holding, ("user", f"u{pid}"), bound)


@given(st.lists(st.none() | _BYTES, max_size=4), st.lists(_RANGES, max_size=3), _BYTES, _BYTES, st.booleans())
def test_to_divide_changes_nothing(
    bounds: list[int | None], ranges: list[Range], count: int, unwatched: int, elsewhere: bool
) -> None:
    """Every share is within the bytes, and asking changes neither what was remembered nor the answer."""
    holders = tuple(_holder(pid, bound) for pid, bound in enumerate(bounds, 1))
    there = frozenset(each.identity for each in holders[:2])
    other = frozenset({(99, 1)}) if elsewhere else frozenset()
    lefts = [Left((50, "ada"), 0.0, float(at), there, other, each) for at, each in enumerate(ranges)]
    ledger = Ledger(80 * GIB, 40 * GIB, GIB, dict.fromkeys(State, 0), count, 0)
    pool = MemoryPool("GPU-0", ledger, holders, ())
    before = copy.deepcopy(lefts)
    answers = []
    for _ in range(2):
        sources = collect_sources(pool, count, lefts, 3.0, unwatched=unwatched, late=0, settled={})
        solution = solve(sources, foreign_bytes([sources]))
        shares = share_out(sources, solution)
        answers.append((shares, undivided_bytes(sources, shares, solution.ranges)))
        assert all(0 <= share.least <= share.most <= count for share in shares.values())
    assert answers[0] == answers[1]
    assert [each.range for each in lefts] == [each.range for each in before]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6), st.data())
def test_a_range_never_excludes_the_truth(bounds: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever each source really has within its range, its narrowed range contains that."""
    ranges = {str(number): Range(min(pair), max(pair)) for number, pair in enumerate(bounds)}
    truth = {name: data.draw(st.integers(each.least, each.most)) for name, each in ranges.items()}
    found = narrow(sum(truth.values()), ranges)
    for name, have in truth.items():
        assert found[name].least <= have <= found[name].most


def test_sources_that_certainly_have_too_much_are_certain_no_more() -> None:
    """Where sources certainly have more than there is, only what others cannot have stays certain."""
    found = narrow(100 * 2**20, {"one": Range(80 * 2**20, 90 * 2**20), "other": Range(70 * 2**20, 2**30)})
    assert found["one"].least == 0
    assert found["other"].least == 10 * 2**20
    assert narrow(0, {"one": Range(2**30, 2**30)}) == {"one": Range(0, 0)}
