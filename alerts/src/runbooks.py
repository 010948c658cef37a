"""Write exporter/vramledger/web/runbooks/*.html from alerts/runbooks/*.md, for the exporter to serve.

The runbooks use a small part of Markdown, and only that is accepted: headings, paragraphs, lists with ``-``
and ``1.``, code between backquotes, and links to other runbooks. Everything else is text, and is escaped.
index.html lists them all, each with the summary of its alert. The exporter adds the frame of the page.

    python alerts/src/runbooks.py [--check]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import yaml

ALERTS = Path(__file__).parents[1]
RUNBOOKS = ALERTS / "runbooks"
PAGES = ALERTS.parent / "exporter" / "vramledger" / "web" / "runbooks"

_ITEM = {"ul": re.compile(r"- (.*)"), "ol": re.compile(r"\d+\. (.*)")}
_INLINE = re.compile(r"`([^`]+)`|\[([^]]+)\]\((\w+)\.md\)")
_UNKNOWN = re.compile(r"[`*]|\]\(|^[#>|~]|^\s|^<")
"""Markdown that is not accepted, in text outside code and links."""


def html_page(name: str, markdown: str) -> str:
    """Return the body of a runbook's page.

    Raises:
        ValueError: it has other Markdown than the small part that is accepted.
    """
    title, *blocks = re.split(r"\n{2,}", markdown.strip())
    if title != f"# {name}":
        message = f"its first line must be '# {name}'"
        raise ValueError(message)
    return "\n".join([f"<h2>{escape(name)}</h2>", *map(_block, blocks)]) + "\n"


def _block(block: str) -> str:
    lines = block.splitlines()
    if block.startswith("## ") and len(lines) == 1:
        return f"<h3>{_inline(block.removeprefix('## '))}</h3>"
    for tag, item in _ITEM.items():
        found = [item.fullmatch(line) for line in lines]
        if found[0]:
            items = [_inline(match[1] if match else line) for match, line in zip(found, lines, strict=True)]
            if not all(found):
                message = f"a list in which not every line is an item: {lines[0]!r}"
                raise ValueError(message)
            return "\n".join([f"<{tag}>", *(f"<li>{text}</li>" for text in items), f"</{tag}>"])
    return f"<p>{' '.join(map(_inline, lines))}</p>"


def _inline(text: str) -> str:
    """Return a line of text with its code and its links as HTML."""
    if _UNKNOWN.search(_INLINE.sub("code", text)):
        message = f"Markdown that is not accepted: {text!r}"
        raise ValueError(message)
    parts = []
    end = 0
    for found in _INLINE.finditer(text):
        parts.append(escape(text[end : found.start()]))
        code, words, name = found.groups()
        parts.append(f"<code>{escape(code)}</code>" if code else f'<a href="{name}">{escape(words)}</a>')
        end = found.end()
    return "".join([*parts, escape(text[end:])])


def index_page(names: list[str]) -> str:
    """Return the body of the page that lists the runbooks, each with the summary of its alert."""
    summaries = _summaries()
    listed = [
        f'<li><a href="{name}">{name}</a> <span>{escape(summaries[name])}</span></li>' for name in names
    ]
    return "\n".join(["<h2>Runbooks</h2>", '<ul class="index">', *listed, "</ul>"]) + "\n"


def _summaries() -> dict[str, str]:
    """Return the summary of each alert; for an alert with two rules, that of the first."""
    found: dict[str, str] = {}
    for path in sorted(ALERTS.glob("*.rules.yml")):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            for rule in group["rules"]:
                if "alert" in rule:
                    found.setdefault(rule["alert"], rule["annotations"]["summary"])
    return found


def pages() -> Iterator[tuple[Path, str]]:
    """Yield every page and its content.

    Raises:
        ValueError: a runbook cannot be used; the message begins with its name below alerts/.
    """
    names = sorted(path.stem for path in RUNBOOKS.glob("*.md"))
    yield PAGES / "index.html", index_page(names)
    for name in names:
        try:
            yield (
                PAGES / f"{name}.html",
                html_page(name, (RUNBOOKS / f"{name}.md").read_text(encoding="utf-8")),
            )
        except ValueError as error:
            message = f"runbooks/{name}.md: {error}"
            raise ValueError(message) from error


def main() -> int:
    """Write the pages, or with ``--check`` say which are not up to date (exit code 1)."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--check", action="store_true", help="write nothing; fail when a page is out of date"
    )
    check = arguments.parse_args().check
    try:
        written = dict(pages())
    except ValueError as error:
        print(f"alerts/{error}", file=sys.stderr)
        return 2
    stale = [path for path, text in written.items() if not path.exists() or path.read_text("utf-8") != text]
    stray = sorted(set(PAGES.glob("*.html")) - written.keys())
    for path in [*stale, *stray]:
        if not check:
            path.unlink() if path in stray else path.write_text(written[path], encoding="utf-8")
        print(f"{'out of date' if check else 'wrote'}: {path.relative_to(ALERTS.parent)}")
    return 1 if check and (stale or stray) else 0


if __name__ == "__main__":
    sys.exit(main())
