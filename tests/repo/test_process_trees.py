"""PROCESS_TREES.md has every tree that the tests play, and the verdict that they demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.players.tree import ALIVE, Tree, Verdict
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, TREES

PAGE = Path(__file__).parents[2] / "exporter" / "docs" / "PROCESS_TREES.md"
ROWS = {
    cells[1]: cells
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("|")
    and len(cells := [cell.strip() for cell in line.replace("\\|", "¦").split("|")]) > 4
}


def agrees(cell: str, verdict: Verdict) -> bool:
    """Tell whether a cell says what a verdict demands."""
    state = "active" if verdict.state == ALIVE.state else verdict.state
    return cell.startswith(f"`{state}`") and verdict.words in cell


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree.name))
def test_a_tree_is_on_the_page(tree: Tree) -> None:
    """The page has the tree with its kind and both verdicts; `python -m tests.tools.trees` writes it."""
    row = ROWS[tree.what.replace("|", "¦")]

    assert row[2] == tree.kind
    assert agrees(row[3], tree.watched), row
    assert agrees(row[4], tree.late), row


def test_there_are_enough_trees() -> None:
    """Sixty trees and more, most of them healthy: a page for one that is not an orphan costs most trust."""
    assert len(HEALTHY) >= 35
    assert len(LEFTOVERS) >= 20
    assert len(TREES) >= 60
    assert len(ROWS) == len(TREES) + 2
