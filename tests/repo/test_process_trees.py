"""PROCESS_TREES.md says what the tests demand of the trees that they play."""

from tests.lab.trees import PAGE, render, shown
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, TREES


def test_the_page_is_what_its_program_writes() -> None:
    """`python -m tests.lab.trees` writes the page from the trees, and it was not changed by hand."""
    assert PAGE.read_text(encoding="utf-8") == render()


def test_who_comes_late_gives_the_same_verdict() -> None:
    """The page says so of state and grade."""
    assert [tree.name for tree in TREES if shown(tree.watched) != shown(tree.late)] == []


def test_there_are_enough_trees() -> None:
    """More than a hundred trees, most of them healthy: a page for one of these costs most trust."""
    assert len(HEALTHY) >= 70
    assert len(LEFTOVERS) >= 36
    assert len(TREES) >= 110
