"""Write exporter/docs/PROCESS_TREES.md: the process trees whose verdict is not the best.

python -m tests.lab.trees
"""

from collections import defaultdict
from pathlib import Path

from tests.support.players.tree import Verdict
from tests.support.players.trees.catalogue import HEALTHY, LEFTOVERS, OTHERS

PAGE = Path(__file__).parents[2] / "exporter" / "docs" / "PROCESS_TREES.md"

BEGINNING = """\
<!-- Written by `python -m tests.lab.trees`: change the trees below tests/support/players, not this file -->

# Process trees

The tests build trees of real processes, with a stand-in for the GPU, and demand a [state](STATES.md) of
each holder. A holder is healthy if somebody wants it to run. It is a leftover if the program that started
it has ended and nobody meant it to go on. A healthy holder should be `active`, which means that nothing is
wrong, and a leftover `orphaned` (proven). On what is `inferred` nothing acts: no alert, no command, no mark
of a node. The trees of which the evidence allows only another verdict are named here; the others are in
`tests/support/players/trees`. An exporter that starts after the launcher has ended gives the same state and
grade as one that watched.
"""

ALIVE, PROVEN = "`active`", "`orphaned` (proven)"


def render() -> str:
    """Return the page: how many trees of each kind get the verdict that they should, and the others."""
    parts = [BEGINNING]
    for title, trees, best in (
        ("Healthy", HEALTHY, ALIVE), ("Leftovers", LEFTOVERS, PROVEN), ("Other states", OTHERS, ""),
    ):  # fmt: skip
        groups: defaultdict[str, list[str]] = defaultdict(list)
        for tree in trees:
            groups[shown(tree.watched)].append(tree.what)
        right = len(groups.pop(best, []))
        parts.append(f"\n## {title}: {len(trees)}\n" + (f"\n{best}: {right}.\n" if best else ""))
        for verdict, names in groups.items():
            parts.append(f"\n{verdict}: {len(names)}\n\n" + "".join(f"- {name}\n" for name in names))
    return "".join(parts)


def shown(verdict: Verdict) -> str:
    """Return a verdict as the page shows it."""
    return ALIVE if verdict.state == "alive" else f"`{verdict.state}` ({verdict.grade})"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
