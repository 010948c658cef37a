"""METRICS.md and its pages are what the generator makes of declarations and texts."""

import re
from pathlib import Path

import pytest

from docs.src.generate import DOCS, parse_text, render_index, render_page, rendered_files, subjects
from vramledger.metrics.contract import FAMILIES
from vramledger.metrics.families import Family

SUBJECTS = list(subjects())
ONE = Family("vramledger_one_bytes", ("gpu",), "One thing.", "ledger", "a call", "never")
TWO = Family("vramledger_two", (), "Another thing.", "ledger", "a file", "when there is none")

TITLE = "# Things\n\nThey are few.\n"
SECTION = "## `{0}`\n\nIt is a thing.\n\n```promql\n{0} > 0\n```\n"


def text(*names: str) -> str:
    return "\n".join([TITLE, *(SECTION.format(name) for name in names)])


def test_the_files_are_what_the_generator_makes() -> None:
    """No page was changed by hand, no source without ``make docs``, and no old page is left."""
    made = rendered_files()

    assert set(DOCS.glob("metrics/*")) | {DOCS / "METRICS.md"} == set(made)
    assert [path.name for path, content in made.items() if path.read_text("utf-8") != content] == []


def test_every_family_has_one_section_and_one_row() -> None:
    """Every family of a scrape is on exactly one page, and once in the index."""
    pages = "\n".join(map(render_page, SUBJECTS))
    headings = re.findall(r"^## `(\w+)`$", pages, re.MULTILINE)
    rows = re.findall(r"^- \[`(\w+)`\]", render_index(), re.MULTILINE)

    assert sorted(headings) == sorted(FAMILIES)
    assert sorted(rows) == sorted(headings)


def test_a_section_has_the_facts_of_the_declaration() -> None:
    """A page shows help, type, unit, labels, collector, absence and, if the help has none, the source."""
    (page,) = (each for each in SUBJECTS if each.name == "hardware")
    shown = render_page(page).partition("## `vramledger_device_clock_hertz`\n\n")[2]

    assert shown.startswith(
        "> Current clock by domain, from nvmlDeviceGetClockInfo.\n\n"
        "Gauge in hertz, by `gpu`, `uuid`, `clock`. Absent when unsupported.\n\n"
        "`clock` is `graphics`, `sm`, `memory` or `video`."
    )
    shown = render_page(page).partition("## `vramledger_device_recovery_action`\n\n")[2]
    told = "; collector `ledger`. Source: nvmlDeviceGetFieldValues. Absent before driver 570"
    assert told in shown, "the help names another source, and most families another collector"


def test_the_order_of_the_text_is_that_of_the_page() -> None:
    """The order of the sections in the text is the order of the page."""
    assert list(parse_text(text(TWO.name, ONE.name), (ONE, TWO)).sections) == [TWO.name, ONE.name]


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (text(ONE.name), "families without a section: ['vramledger_two']"),
        (text(ONE.name, TWO.name, "vramledger_three"), "sections without a family, or twice: ['vramledger_t"),
        (text(ONE.name, TWO.name, TWO.name), "or twice: ['vramledger_two']"),
        (text(ONE.name, TWO.name).replace("They are few.", ""), "begins with a title and an introduction"),
        (text(ONE.name, TWO.name).replace("It is a thing.", ""), "needs a sentence before its query"),
        (text(ONE.name, TWO.name) + "\n```promql\nvramledger_two\n```\n", "has at most one block of promql"),
        (text(ONE.name, TWO.name).replace("two > 0", "one > 0"), "vramledger_two has at most one block"),
    ],
)
def test_a_text_that_does_not_fit_is_refused(written: str, complaint: str) -> None:
    """A family without a text, a text without a family, and a section without notes are errors."""
    with pytest.raises(ValueError, match=re.escape(complaint)):
        parse_text(written, (ONE, TWO))


@pytest.mark.parametrize("path", rendered_files(), ids=lambda path: path.name)
def test_every_metric_that_a_text_names_exists(path: Path) -> None:
    """A name between backticks that begins with our prefix is a family."""
    named = set(re.findall(r"`(vramledger_\w+)(?=[`{])", path.read_text("utf-8")))

    assert named - set(FAMILIES) == set()
