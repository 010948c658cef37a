"""The balance of a device."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.sure import sure
from vramledger.accounting.ledger import balance
from vramledger.model.reading import MemoryReading
from vramledger.model.snapshot import State

MIB = 1024**2
amounts = st.integers(min_value=0, max_value=2**48)
holdings = st.lists(st.tuples(st.sampled_from(State), amounts), max_size=50)


@given(free=amounts, used=amounts, reserved=st.none() | amounts, held=holdings)
def test_the_book_adds_up(free: int, used: int, reserved: int | None, held: list[tuple[State, int]]) -> None:
    """For all figures of the driver, free, reserved, states and unattributed add up to the total."""
    total = free + used + (reserved or 0)
    ledger = sure(balance(MemoryReading(total, free, used, reserved), held))
    unused = ledger.free + (ledger.driver_reserved or 0)
    assert total == unused + sum(ledger.states.values()) + ledger.unattributed
    assert min(*ledger.states.values(), ledger.unattributed, ledger.overlap) >= 0
    assert sum(each for _, each in held) == sum(ledger.states.values()) + ledger.overlap
    assert not (ledger.overlap and ledger.unattributed)
    assert used == ledger.used


def test_bytes_without_a_holder_are_unattributed() -> None:
    """Used memory beyond the holdings is unattributed (14 MiB of 32,000 on the measured H200)."""
    memory = MemoryReading(143771 * MIB, 143771 * MIB - 32000 * MIB - 644939776, 32000 * MIB, 644939776)
    ledger = sure(balance(memory, [(State.ACTIVE, 10954 * MIB), (State.IDLE, 21032 * MIB)]))
    assert ledger.unattributed == 14 * MIB
    assert ledger.overlap == 0


def test_an_overlap_comes_off_the_largest_state_first() -> None:
    """If holdings add up to more than used, the state with the most bytes loses the excess."""
    ledger = balance(MemoryReading(100, 40, 60, 0), [(State.ACTIVE, 50), (State.IDLE, 30), (State.DEAD, 10)])
    assert ledger is not None
    assert (ledger.states[State.ACTIVE], ledger.states[State.IDLE], ledger.states[State.DEAD]) == (20, 30, 10)
    assert ledger.overlap == 30


def test_an_unknown_reserve_is_not_zero() -> None:
    """If the driver does not report its reserve, the ledger says None and counts it as used."""
    ledger = sure(balance(MemoryReading(100, 40, 60, None), []))
    assert ledger.driver_reserved is None
    assert ledger.unattributed == 60


def test_figures_that_contradict_themselves_make_no_book() -> None:
    """If free and reserved exceed the total there is no ledger, rather than a negative one."""
    assert balance(MemoryReading(100, 90, 0, 20), []) is None
