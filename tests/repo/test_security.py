"""SECURITY.md: each claim that is a row or a point names the tests that keep it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = {
    name
    for file in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE)
}
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
CLAIMS = [
    *re.findall(r"^\| (?:anybody|somebody|a user|a web|a container|a process) .*$", TEXT, re.MULTILINE),
    *re.findall(r"^- .*(?:\n {2}.*)*", TEXT, re.MULTILINE),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: re.sub(r"\W+", "-", claim[:30]))
def test_each_claim_has_its_tests(claim: str) -> None:
    """Its last comment names tests, and every one of them exists."""
    named = re.search(r"<!-- ([\w ]+) -->(?:\||$)", claim)
    assert named is not None
    assert set(named[1].split()) <= TESTS


def test_all_claims_are_found() -> None:
    """The table and the lists of all sections are looked at."""
    assert len(CLAIMS) == TEXT.count("<!--") > 30
