"""PROCESS_TREES.md says what the tests demand of the trees that they play."""

from __future__ import annotations

from tests.lab.trees import ALIVE, PAGE, PROVEN, render, shown
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, OTHERS, TREES


def test_the_page_is_what_its_program_writes() -> None:
    """`python -m tests.lab.trees` writes the page from the trees, and it was not changed by hand."""
    assert PAGE.read_text(encoding="utf-8") == render()


def test_the_page_names_what_gets_another_verdict() -> None:
    """Each tree that is not judged as it should be is on the page, and no other; all are counted."""
    healthy = [tree.what for tree in HEALTHY if shown(tree.watched) != ALIVE]
    leftovers = [tree.what for tree in LEFTOVERS if shown(tree.watched) != PROVEN]
    named = [line.removeprefix("- ") for line in render().splitlines() if line.startswith("- ")]

    assert sorted(named) == sorted([*healthy, *leftovers, *(tree.what for tree in OTHERS)])
    assert f"\n{ALIVE}: {len(HEALTHY) - len(healthy)}.\n" in render()
    assert f"\n{PROVEN}: {len(LEFTOVERS) - len(leftovers)}.\n" in render()


def test_who_comes_late_gives_the_same_verdict() -> None:
    """The page says so of state and grade."""
    assert [tree.name for tree in TREES if shown(tree.watched) != shown(tree.late)] == []


def test_there_are_enough_trees() -> None:
    """More than a hundred trees, most of them healthy: a page for one of these costs most trust."""
    assert len(HEALTHY) >= 70
    assert len(LEFTOVERS) >= 36
    assert len(TREES) >= 110
