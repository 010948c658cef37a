"""Numbers of bytes that are known within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vramledger.accounting.byte_ranges import Range, narrow


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
