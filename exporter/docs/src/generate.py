"""Write exporter/docs/METRICS.md and exporter/docs/metrics/ from the families' declarations.

Each page has one subject: a module of ``vramledger/metrics``. Its facts come from the declarations. The
title, introduction and further notes on each family are in metrics/SUBJECT.md in this folder: a section for
each family, in the order of the page, with one example query in a block of PromQL. index.md in this folder
begins METRICS.md. The families that prometheus_client gives of the exporter's own processes have no
declaration of ours: their facts come from the page that a scrape gets.

    python exporter/docs/src/generate.py [--check]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from vramledger.agent_protocol.frameworks import FRAMEWORKS
from vramledger.metrics.contract import FAMILIES, SUBJECTS
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Family
from vramledger.model.snapshot import Snapshot

SOURCES = Path(__file__).parent
DOCS = SOURCES.parent
EXPORTER = "exporter"
"""The subject of the metrics of the exporter itself, and their collector's name; its page comes last."""

HEADER = (
    "<!-- Written by `make docs` from {source} and the declarations: change those, not this file. -->\n\n"
)
_SECTION = re.compile(r"^## `(\w+)`\n+", re.MULTILINE)
_QUERY = re.compile(r"^```promql\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Section(NamedTuple):
    """The text about one family: notes in Markdown, and the query in them."""

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


def exporter_families() -> tuple[Family, ...]:
    """Return prometheus_client's figures of the exporter and its sampler, as the families of a scrape."""
    exposition = Exposition(0, os.getpid)
    page = exposition.render(Snapshot(), ScrapeRequest(frozenset({"exporter"}))).decode()
    return tuple(
        Family(
            metric.samples[0].name,
            tuple(sorted(metric.samples[0].labels)),
            f"{metric.documentation.removesuffix('.')}.",
            EXPORTER,
            *_exporter_facts(metric.name),
        )
        for metric in sorted(text_string_to_metric_families(page), key=lambda each: each.name)
        if metric.samples[0].name not in FAMILIES
    )


def _exporter_facts(name: str) -> tuple[str, str]:
    """Return source and absence of a family of prometheus_client."""
    if name == "python_info":
        return "Python's `platform`", "never"
    files = {"open_fds": "fd", "max_fds": "limits"}
    file = next((file for end, file in files.items() if name.endswith(end)), "stat")
    if name.startswith("vramledger_sampler_"):
        return f"`/proc/PID/{file}` of the sampler", "when there is no sampler"
    return f"`/proc/self/{file}`", "never"


def _with_frameworks(text: str) -> str:
    """Put the names of the frameworks, in their order of precedence, in the place of ``@FRAMEWORKS@``."""
    names = [f"`{framework.name}`" for framework in FRAMEWORKS]
    return text.replace("@FRAMEWORKS@", f"{', '.join(names[:-1])} or {names[-1]}")


def parse_text(text: str, families: tuple[Family, ...]) -> Text:
    """Read the text of a subject.

    Raises:
        ValueError: its sections do not match the families, each once; or one has no notes, or not exactly
            one query.
    """
    start, *rest = _SECTION.split(text)
    title, _, introduction = start.partition("\n")
    names = rest[::2]
    missing = sorted({family.name for family in families} - set(names))
    extra = sorted((Counter(names) - Counter({family.name for family in families})).elements())
    if missing or extra:
        message = f"families without a section: {missing}; sections without a family, or twice: {extra}"
        raise ValueError(message)
    if not title.startswith("# ") or not introduction.strip():
        message = "it begins with a title and an introduction"
        raise ValueError(message)
    sections = dict(zip(names, map(parse_section, names, rest[1::2]), strict=True))
    return Text(title.removeprefix("# "), introduction.strip(), sections)


def parse_section(name: str, text: str) -> Section:
    """Read the text under the heading of one family.

    Raises:
        ValueError: it has no notes, or not exactly one query.
    """
    queries = _QUERY.findall(text)
    if len(queries) != 1 or not re.search(rf"\b{name}\b", queries[0]):
        message = f"{name} needs exactly one block of promql, with the family in it"
        raise ValueError(message)
    if not text.partition("```")[0].strip():
        message = f"{name} needs a sentence before its query"
        raise ValueError(message)
    return Section(text.strip(), queries[0].strip())


def subjects() -> Iterator[Subject]:
    """Yield every subject, with its families and its text.

    Raises:
        ValueError: a text cannot be used; the message begins with its file.
    """
    for subject, families in {**SUBJECTS, EXPORTER: exporter_families()}.items():
        path = SOURCES / "metrics" / f"{subject}.md"
        try:
            yield Subject(
                subject, families, parse_text(_with_frameworks(path.read_text(encoding="utf-8")), families)
            )
        except ValueError as error:
            message = f"src/metrics/{path.name}: {error}"
            raise ValueError(message) from error


def queries() -> Mapping[str, str]:
    """Return the example query of every family by the family's name.

    Raises:
        ValueError: see :func:`subjects`.
    """
    return {name: query for subject in subjects() for name, (_, query) in subject.text.sections.items()}


def render_family(family: Family, section: Section) -> str:
    """Return the part of a page about one family."""
    kind = f"{family.kind}, in {family.unit.replace('_', ' ')}" if family.unit else family.kind
    labels = ", ".join(f"`{label}`" for label in family.labels) or "none"
    return f"""## `{family.name}`

> {family.help}

- **Type:** {kind}
- **Labels:** {labels}
- **Collector:** `{family.collector}`
- **Source:** {family.source}
- **Absent:** {family.absent}

{section.notes}
"""


def render_page(subject: Subject) -> str:
    """Return the page of one subject."""
    text = subject.text
    head = f"# {text.title}\n\n[All metrics](../METRICS.md)\n\n{text.introduction}\n"
    parts = [render_family(family, text.sections[family.name]) for family in subject.in_order()]
    return HEADER.format(source=f"../src/metrics/{subject.name}.md") + "\n".join([head, *parts])


def render_index() -> str:
    """Return METRICS.md: how to read the families, and a table of them for each subject.

    Raises:
        ValueError: see :func:`subjects`.
    """
    parts = [(SOURCES / "index.md").read_text(encoding="utf-8")]
    for subject in subjects():
        page = f"metrics/{subject.name}.md"
        rows = "".join(
            f"| [`{family.name}`]({page}#{family.name}) | {family.kind} | {family.help} |\n"
            for family in subject.in_order()
        )
        head = f"## {subject.text.title}\n\n[{page}]({page})\n\n| family | type | meaning |\n|---|---|---|\n"
        parts.append(head + rows)
    return HEADER.format(source="src/index.md") + "\n".join(parts)


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
