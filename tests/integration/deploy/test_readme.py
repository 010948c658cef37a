"""deploy/README.md is true: the tests that it names exist, and so do the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
READMES = sorted((ROOT / "deploy").glob("**/README.md"))


def test_named_tests_exist() -> None:
    """Every test that the README names exists."""
    text = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)

    assert len(named) > 10
    assert [
        (path, name)
        for path, name in named
        if not (ROOT / path).exists()
        or (name and f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_links_lead_somewhere(readme: Path) -> None:
    """Every link of a README to a file of the repository leads to an existing file."""
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", readme.read_text(encoding="utf-8"))

    assert [target for target in targets if not (readme.parent / target).exists()] == []
