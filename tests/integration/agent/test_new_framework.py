"""A framework is declared in one place."""

import re
import tokenize
from pathlib import Path

from framework_files import WRITERS
from tests.support.listening import PROJECT
from vramledger_agent.protocol.frameworks import FRAMEWORKS

DECLARATION = Path("agent/vramledger_agent/protocol/frameworks.py")

OWN_CODE = ("frameworks/*.py", "torch/*.py", "torch_snapshots/*.py")
"""The files that read one framework and may name it."""


def test_what_follows_is_written() -> None:
    """The start-up file matches the declarations; otherwise run ``make generate``."""
    for path, write in WRITERS.items():
        text = path.read_text(encoding="utf-8")
        assert write(text) == text, path


def words(path: Path) -> set[str]:
    """Return the string literals of a Python file, or all words of another file."""
    if path.suffix != ".py":
        return set(re.findall(r"[\w.]*\w", path.read_text(encoding="utf-8")))
    with path.open("rb") as file:
        tokens = [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.STRING]
    return {token.strip("rbf\"'") for token in tokens}


def test_nobody_else_lists_frameworks() -> None:
    """No source of exporter, agent, page, rules or dashboards names two frameworks; the declaration does."""
    names = {name for each in FRAMEWORKS for name in (each.name, each.title)} - {"cuda", "CUDA"}
    written = {path.relative_to(PROJECT) for path in WRITERS}
    places = ("exporter/vramledger", "exporter/agent", "dashboards/src", "alerts/src")
    listing = {}
    for place in places:
        for path in sorted((PROJECT / place).rglob("*")):
            own = any(path.relative_to(PROJECT / place).match(pattern) for pattern in OWN_CODE)
            if path.suffix not in (".py", ".js", ".yml") or own:  # not the runbooks, which are prose
                continue
            found = names & words(path)
            if len(found) > 1:
                listing[path.relative_to(PROJECT)] = found
    assert set(listing) - written == {Path("exporter") / DECLARATION}
