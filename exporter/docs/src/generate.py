"""Write into METRICS.md and the pages of exporter/docs/metrics/ what follows from the declarations.

Each page has one subject: a module of ``vramledger/metrics``, and a section for each family. The facts at the
beginning of a section come from the declaration, all else is written in the page itself: notes, with at most
one example query in a block of PromQL, where the name does not say it. The lists of METRICS.md, below its
mark, are written from the pages.

    python exporter/docs/src/generate.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vramledger.metrics.contract import SUBJECTS
from vramledger.metrics.families import Family
from vramledger_agent.protocol.frameworks import FRAMEWORKS

DOCS = Path(__file__).parents[1]
HEADER = "<!-- `make docs` writes the facts below each heading. -->\n\n"
UP = "[All metrics](../METRICS.md)"
"""Below the title of each page; the collector of most families follows."""
MARK = "<!-- `make docs` writes what follows. -->\n\n"
"""Where the lists of METRICS.md begin."""

_SECTION = re.compile(r"^## `(\w+)`\n+", re.MULTILINE)
_HEAD = re.compile(rf"^{re.escape(UP)}[^\n]*\n", re.MULTILINE)
_FACTS = re.compile(r"\A> [^\n]*\n+(?:Gauge|Counter|Info)\b[^\n]*\n+")
_FRAMEWORKS = re.compile(r"(?<=<!-- frameworks -->).*?(?=<!-- end -->)", re.DOTALL)
_QUERY = re.compile(r"^```promql\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """The text about one family: notes in Markdown, and the query in them, if there is one."""

    notes: str
    query: str


class Text(NamedTuple):
    """The text of one subject; ``sections`` are by the name of the family."""

    title: str
    introduction: str
    sections: Mapping[str, Section]


class Subject(NamedTuple):
    """One page: its name is that of the file."""

    name: str
    families: tuple[Family, ...]
    text: Text

    def in_order(self) -> list[Family]:
        """Return the families in the order of the page."""
        order = list(self.text.sections)
        return sorted(self.families, key=lambda family: order.index(family.name))


def _with_frameworks(text: str) -> str:
    """Put the names of the frameworks, in their order of precedence, between their marks."""
    names = [f"`{framework.name}`" for framework in FRAMEWORKS]
    return _FRAMEWORKS.sub(f"{', '.join(names[:-1])} or {names[-1]}", text)


def parse_text(text: str, families: tuple[Family, ...]) -> Text:
    """Read the text of a subject.

    Raises:
        ValueError: its sections do not match the families; or one has no notes, or several queries.
    """
    start, *rest = _SECTION.split(text.removeprefix(HEADER))
    title, _, introduction = start.partition("\n")
    names = rest[::2]
    missing = sorted({family.name for family in families} - set(names))
    extra = sorted((Counter(names) - Counter({family.name for family in families})).elements())
    if missing or extra:
        message = f"families without a section: {missing}; sections without a family, or twice: {extra}"
        raise ValueError(message)
    introduction = _HEAD.sub("", introduction).strip()
    if not title.startswith("# ") or not introduction:
        message = "it begins with a title and an introduction"
        raise ValueError(message)
    sections = dict(zip(names, map(parse_section, names, rest[1::2]), strict=True))
    return Text(title.removeprefix("# "), introduction, sections)


def parse_section(name: str, text: str) -> Section:
    """Read the text under the heading of one family.

    Raises:
        ValueError: it has no notes, several queries, or a query of something else.
    """
    text = _FACTS.sub("", text)
    queries = _QUERY.findall(text)
    query = "".join(queries).strip()
    if len(queries) > 1 or (query and not re.search(rf"\b{name}\b", query)):
        message = f"{name} has at most one block of promql, with the family in it"
        raise ValueError(message)
    if not text.partition("```")[0].strip():
        message = f"{name} needs a sentence before its query"
        raise ValueError(message)
    return Section(text.strip(), query)


def subjects() -> Iterator[Subject]:
    """Yield every subject, with its families and its text.

    Raises:
        ValueError: a text cannot be used; the message begins with its file.
    """
    for subject, families in SUBJECTS.items():
        path = DOCS / "metrics" / f"{subject}.md"
        try:
            yield Subject(
                subject, families, parse_text(_with_frameworks(path.read_text(encoding="utf-8")), families)
            )
        except ValueError as error:
            message = f"metrics/{path.name}: {error}"
            raise ValueError(message) from error


def queries() -> Mapping[str, str]:
    """Return the example queries by the name of their family.

    Raises:
        ValueError: see :func:`subjects`.
    """
    return {
        name: query for subject in subjects() for name, (_, query) in subject.text.sections.items() if query
    }


def render_family(family: Family, section: Section, usual: str) -> str:
    """Return the part of a page about one family, with its collector if that is not the ``usual`` one."""
    unit = f" in {family.unit.replace('_', ' ')}" if family.unit else ""
    unit = unit.replace("in ratio", "as a ratio").replace("in celsius", "in °C")
    labels = f", by {', '.join(f'`{label}`' for label in family.labels)}" if family.labels else ""
    by = "" if family.collector == usual else f"; collector `{family.collector}`"
    source = "" if family.source.replace("`", "") in family.help else f" Source: {family.source}."
    absent = f"Absent {family.absent}.".replace("Absent never", "Never absent")
    return f"""## `{family.name}`

> {family.help}

{family.kind.capitalize()}{unit}{labels}{by}.{source} {absent}

{section.notes}
"""


def render_page(subject: Subject) -> str:
    """Return the page of one subject."""
    text = subject.text
    [(usual, count)] = Counter(family.collector for family in subject.families).most_common(1)
    others = " unless a family names another" if count < len(subject.families) else ""
    head = f"# {text.title}\n\n{UP}. Collector{others}: `{usual}`.\n\n{text.introduction}\n"
    parts = [render_family(family, text.sections[family.name], usual) for family in subject.in_order()]
    return HEADER + "\n".join([head, *parts])


def render_index() -> str:
    """Return METRICS.md: how to read the families, and their names for each subject.

    Raises:
        ValueError: see :func:`subjects`.
    """
    introduction, mark, _ = (DOCS / "METRICS.md").read_text(encoding="utf-8").partition(MARK)
    parts = []
    for subject in subjects():
        page = f"metrics/{subject.name}.md"
        names = "".join(f"- [`{family.name}`]({page}#{family.name})\n" for family in subject.in_order())
        parts.append(f"## [{subject.text.title}]({page})\n\n{names}")
    return introduction + mark + "\n".join(parts)


def rendered_files() -> dict[Path, str]:
    """Return every file and its content.

    Raises:
        ValueError: see :func:`subjects`.
    """
    pages = {DOCS / "metrics" / f"{each.name}.md": render_page(each) for each in subjects()}
    return {DOCS / "METRICS.md": render_index(), **pages}


def main() -> int:
    """Write the files, or with ``--check`` say which are not up to date (exit code 1)."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is out of date"
    )
    check = arguments.parse_args().check
    try:
        files = rendered_files()
    except ValueError as error:
        print(f"exporter/docs/{error}", file=sys.stderr)
        return 2
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{'out of date' if check else 'wrote'}: exporter/docs/{path.relative_to(DOCS)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
