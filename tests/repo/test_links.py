"""Links between the documents lead to files and headings that exist, and SECURITY.md to tests."""

import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOURCES = ROOT / "exporter" / "docs" / "src"
"""Texts that pages are made of: their links hold from where the pages are."""

DOCUMENTS = [
    path
    for folder in ("*", "alerts/**/*", "dashboards/**/*", "deploy/**/*", "exporter/docs/**/*")
    for path in sorted(ROOT.glob(f"{folder}.md"))
    if not path.is_relative_to(SOURCES)
]


def prose(path: Path) -> str:
    """Return a document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors that a page of Markdown gets from its headings."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles)


def test_every_link_within_the_project_leads_somewhere() -> None:
    """The file of a relative link exists, and so does the heading that it names."""
    broken = []
    links = [(path, link) for path in DOCUMENTS for link in re.findall(r"\]\(([^)\s]+)\)", prose(path))]
    for path, link in links:
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if re.match(r"\w+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append((path, link))
    assert len(links) > 100
    assert broken == []


def test_tests_that_deployment_names_exist() -> None:
    """Every test that deploy/README.md names exists."""
    text = (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", text)
    assert len(named) > 10
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path, _ in named}
    assert [name for path, name in named if name and f"def {name}(" not in texts[path]] == []


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "exporter/docs").glob("*.md"))])
def test_modules_that_documents_name_exist(path: Path) -> None:
    """Every ``folder/module.py`` that CONTRIBUTING or a page of exporter/docs names exists."""
    named = re.findall(r"`([\w/]+/[a-z_]+\.py)`", path.read_text(encoding="utf-8"))
    modules = [*ROOT.glob("exporter/**/*.py"), *ROOT.glob("tests/**/*.py")]
    assert [name for name in named if not any(str(each).endswith(f"/{name}") for each in modules)] == []


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
