"""README.ko.md says what README.md says: outline, commands, code, links and tables of each section."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
LINK = re.compile(r"\]\(([^)]+)\)|<(https?://[^>]+)>")
OTHER = {"README.md": "README.ko.md", "README.ko.md": "README.md"}


class Section(NamedTuple):
    """The content of one heading."""

    level: int
    title: str
    code: list[str]
    prose: str
    tables: list[list[str]]


def sections(name: str) -> list[Section]:
    """Return the sections of a README, in order."""
    found: list[Section] = []
    fenced = ""
    lines: list[str] = []
    for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
        heading = None if fenced else re.fullmatch(r"(#+) (.*)", line)
        if line.startswith("```"):
            fenced = "" if fenced else line
        if heading:
            found.append(Section(len(heading[1]), heading[2], [], "", []))
            lines = []
        lines.append(line)
        found[-1] = section(found[-1], lines)
    return found


def section(empty: Section, lines: list[str]) -> Section:
    """Divide the lines of a section into code, tables and prose."""
    text = "\n".join(lines[1:])
    fences = re.findall(r"^```.*?^```$", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    .*$", text, re.MULTILINE)
    text = re.sub(r"^    .*$", "", text, flags=re.MULTILINE)
    rows = [
        re.split(r" *\| *", line.strip().strip("|").strip()) for line in text.splitlines() if line[:1] == "|"
    ]
    return Section(empty.level, empty.title, fences + indented, text, rows)


ENGLISH, KOREAN = sections("README.md"), sections("README.ko.md")
BOTH = list(zip(ENGLISH, KOREAN, strict=False))
every_section = pytest.mark.parametrize(("english", "korean"), BOTH, ids=[each.title for each, _ in BOTH])


def test_outline_is_the_same() -> None:
    """There are as many headings, of the same levels, in the same order."""
    assert [each.level for each in KOREAN] == [each.level for each in ENGLISH]


@every_section
def test_code_is_the_same(english: Section, korean: Section) -> None:
    """Every block of code and every terminal sample is the same, to the letter."""
    assert korean.code == english.code


@every_section
def test_commands_and_names_are_the_same(english: Section, korean: Section) -> None:
    """A section names the same commands, flags, metrics and files, and other names as often."""

    def named(text: str) -> Counter[str]:
        return Counter(" ".join(span.split()) for span in SPAN.findall(text))

    assert named(korean.prose) == named(english.prose)


@every_section
def test_links_lead_to_the_same_places(english: Section, korean: Section) -> None:
    """Links and pictures are the same; one within the page leads to a heading of its own language."""

    def links(of: Section, headings: list[Section]) -> Counter[str]:
        slugs = {re.sub(r"[^\w\- ]", "", each.title.lower()).replace(" ", "-"): each for each in headings}
        found = (link or address for link, address in LINK.findall(of.prose))
        return Counter(
            f"#{headings.index(slugs[each[1:]])}" if each.startswith("#") else OTHER.get(each, each)
            for each in found
        )

    expected = links(english, ENGLISH)
    if english is ENGLISH[0]:
        expected = Counter({OTHER.get(name, name): count for name, count in expected.items()})
    assert links(korean, KOREAN) == expected


@every_section
def test_tables_have_the_same_rows(english: Section, korean: Section) -> None:
    """Tables have the same rows: the same names in the first column, and the same figures."""

    def rows(of: Section) -> list[tuple[int, list[str], list[str]]]:
        return [(len(row), SPAN.findall(row[0]), figures(" ".join(row))) for row in of.tables]

    assert rows(korean) == rows(english)


@every_section
def test_prose_has_the_same_figures(english: Section, korean: Section) -> None:
    """Every figure of the English prose is in the Korean prose, which also has figures for "a second"."""

    def counted(of: Section) -> Counter[str]:
        return Counter(figures(re.sub(r"^\|.*$", "", LINK.sub("]", of.prose), flags=re.MULTILINE)))

    assert counted(english) <= counted(korean)


def figures(text: str) -> list[str]:
    """Return the figures of a text, sorted, because the order of words differs."""
    return sorted(re.findall(r"\d[\d.,]*\d|\d", SPAN.sub("", text)))


def test_each_points_to_the_other() -> None:
    """The link to the other language is at the top."""
    for name, other in OTHER.items():
        top = (ROOT / name).read_text(encoding="utf-8").splitlines()[:4]
        assert any(f"]({other})" in line for line in top)
