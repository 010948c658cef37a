"""Write exporter/docs/PROCESS_TREES.md: play every process tree, and note what vramledger says of it.

python -m tests.tools.trees
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.integration.accounting.test_states_real import Watcher
from tests.support.players.tree import Tree
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, OTHERS
from vramledger.model.snapshot import Holding, State

PAGE = Path(__file__).parents[2] / "exporter" / "docs" / "PROCESS_TREES.md"

BEGINNING = """\
<!-- Written by `python -m tests.tools.trees`: change the trees below tests/support/players, not this file -->

# Process trees

Each row is a tree of real processes that the tests build, with a stand-in for the GPU. A holder is healthy if
somebody wants it to run. It is a leftover if the program that started it has ended and nobody meant it to go
on. The third column is what vramledger says if it has watched since before the launcher ended. The last
column is what it says if it comes after that. Where the launcher lives on, nothing is killed. `active` means
that nothing is wrong.

[What each state means](STATES.md)
"""

HEAD = "| tree | kind | watched | seen late |\n|---|---|---|---|\n"


def main() -> None:
    """Write the page."""
    parts = [BEGINNING]
    for title, trees in (("Healthy", HEALTHY), ("Leftovers", LEFTOVERS), ("Other states", OTHERS)):
        rows = "".join(_row(tree) for tree in trees)
        parts.append(f"\n## {title}: {len(trees)}\n\n{HEAD}{rows}")
    PAGE.write_text("".join(parts), encoding="utf-8")


def _row(tree: Tree) -> str:
    with tree.play() as cast:
        watcher = Watcher(cast.pids)
        watcher.look()
        cast.lose_launcher()
        watched, late = watcher.look(), Watcher(cast.pids).look()
    return (
        f"| {tree.what.replace('|', chr(92) + '|')} | {tree.kind} | {verdict(watched)} | {verdict(late)} |\n"
    )


def verdict(holdings: list[Holding]) -> str:
    """Return what is said of the holders of a tree, without what differs from run to run."""
    return "; ".join(dict.fromkeys(_words(holdings)))


def _words(holdings: list[Holding]) -> Iterator[str]:
    for holding in holdings:
        if holding.state in (State.ACTIVE, State.IDLE):
            yield "`active`"
            continue
        why = holding.why.replace("; whether it works on the GPU is not known yet", "")
        why = re.sub(r"; [^;]* has adopted it", "; another process has adopted it", why)
        yield f"`{holding.state.value}`: {re.sub(r'pid [0-9]+', 'pid …', why)}"


if __name__ == "__main__":
    main()
