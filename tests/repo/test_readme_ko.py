"""README.ko.md says what README.md says: outline, commands, code, links and tables of each section."""

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
    level: int
    title: str
    code: list[str]
    prose: str
    tables: list[list[str]]


def sections(name: str) -> list[Section]:
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


def content(of: Section, headings: list[Section]) -> dict[str, object]:
    """Return what both languages share: code, names, where links lead, names and figures of tables."""
    slugs = {re.sub(r"[^\w\- ]", "", each.title.lower()).replace(" ", "-"): each for each in headings}
    links = (link or address for link, address in LINK.findall(of.prose))
    return {
        "code": of.code,
        "names": Counter(" ".join(span.split()) for span in SPAN.findall(of.prose)),
        "links": Counter(
            f"#{headings.index(slugs[each[1:]])}" if each.startswith("#") else OTHER.get(each, each)
            for each in links
        ),
        "tables": [(len(row), SPAN.findall(row[0]), figures(" ".join(row))) for row in of.tables],
    }


@every_section
def test_content_is_the_same(english: Section, korean: Section) -> None:
    """A section has the same code, names, links and tables; a link within the page stays in its language."""
    expected, found = content(english, ENGLISH), content(korean, KOREAN)
    if english is ENGLISH[0]:
        links = expected["links"]
        assert isinstance(links, Counter)
        expected["links"] = Counter({OTHER.get(name, name): count for name, count in links.items()})
    assert found == expected


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
