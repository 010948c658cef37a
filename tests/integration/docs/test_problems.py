"""The outputs in the documents are those of the program, for the recordings that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.exporter import no_driver, run
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Snapshot
from vramledger.sampling.replay import read_recording
from vramledger.views.evidence import evidence_lines
from vramledger.views.table import render_table

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "exporter" / "docs"
RECORDINGS = ROOT / "tests" / "recordings"


def shown(page: str, command: str) -> list[str]:
    """Return the lines that a page shows below a command, without their indentation."""
    text = (DOCS / page).read_text(encoding="utf-8")
    block = text[text.index(f"    $ {command}\n") :].partition("\n")[2]
    lines = re.match(r"(?:    .*\n)+", block)
    assert lines is not None
    return [line.strip() for line in lines[0].splitlines()]


def newest(name: str) -> Snapshot:
    """Return the last sample of a recording."""
    tracker = HoldingTracker(idle_after=6.0)
    snapshot = tracker.blank
    for reading in read_recording(RECORDINGS / name):
        snapshot = tracker.update(reading)
    return snapshot


@pytest.mark.parametrize("page", ["COMMANDS.md", "PROBLEMS.md"])
def test_what_fit_prints_is_real(page: str, tmp_path: Path) -> None:
    """Each line of the sample is a line of the program's output."""
    done = run("fit", str(RECORDINGS / "agents.jsonl.gz"), "--pid=416", driver=no_driver(tmp_path))
    printed = [line.strip() for line in done.stdout.splitlines()]

    assert [
        line for line in shown(page, "vramledger fit agents.jsonl.gz --pid 416") if line not in printed
    ] == []


def test_what_show_prints_is_real() -> None:
    """The zombie's table, and the evidence for a cache, are the program's own words."""
    table = [line.strip() for line in render_table(newest("zombie-leader.jsonl.gz")).splitlines()]
    assert [line for line in shown("PROBLEMS.md", "vramledger show") if line not in table] == []

    evidence = [line.strip() for line in evidence_lines(newest("agents.jsonl.gz"), 414)]
    for line in shown("PROBLEMS.md", "vramledger show --why 414"):
        assert any(each.startswith(line.removesuffix("…")) for each in evidence), line
