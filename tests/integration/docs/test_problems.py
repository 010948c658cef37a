"""The outputs in the documents are those of the program, for the recordings that they name."""

import re
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from tests.support.exporter import no_driver, run
from vramledger_agent.oom.report_file import format_report
from vramledger_agent.protocol.messages import CATEGORIES
from vramledger_agent.protocol.user_code import PHASES

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


def lines_of(done: CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return [line.strip() for line in done.stdout.splitlines()]


def test_what_fit_prints_is_real(tmp_path: Path) -> None:
    """Each line of the sample is a line of the program's output."""
    done = run("fit", str(RECORDINGS / "agents.jsonl.gz"), "--pid=416", driver=no_driver(tmp_path))
    printed = [line.strip() for line in done.stdout.splitlines()]

    sample = shown("COMMANDS.md", "vramledger fit agents.jsonl.gz --pid 416")
    assert [line for line in sample if line not in printed] == []


def test_what_show_prints_is_real(tmp_path: Path) -> None:
    """The zombie's table, and the evidence for a cache, are what ``show`` prints of these recordings."""
    nothing = no_driver(tmp_path)
    table = lines_of(run("show", f"--source=replay:{RECORDINGS / 'zombie-leader.jsonl.gz'}", driver=nothing))
    assert [line for line in shown("PROBLEMS.md", "vramledger show") if line not in table] == []

    source = f"--source=replay:{RECORDINGS / 'agents.jsonl.gz'}"
    evidence = lines_of(run("show", "--why=414", source, driver=nothing))
    for line in shown("PROBLEMS.md", "vramledger show --why 414"):
        assert any(each.startswith(line.removesuffix("…")) for each in evidence), line


def mib(size: float) -> int:
    return round(size * 2**20)


def step(batch: int | None, *peaks: float, finished: bool = True, **categories: float) -> dict[str, Any]:
    """Return a step as a report has it: the peak of each phase, and what it was for, in MiB."""
    held = {name: mib(categories.get(name, 0)) for name in CATEGORIES}
    named = zip(PHASES, peaks, strict=False)
    phases = {name: {"bytes": mib(peak), "categories": held} for name, peak in named}
    return {"batch": batch, "finished": finished, "whole": True, "phases": phases}


def line(size: float, blocks: int, place: int, function: str, *callers: dict[str, Any]) -> dict[str, Any]:
    """Return a line of code with live bytes, in MiB, as a report has it."""
    entry = {"file": "train.py", "line": place, "function": function, "callers": list(callers)}
    return {**entry, "bytes": mib(size), "blocks": blocks}


CALLER = {"file": "train.py", "line": 14, "function": "<module>"}
FLIGHT: dict[str, Any] = {
    "lines": [
        line(6.07 * 1024, 1427, 10, "evaluate", CALLER),
        line(609.61, 146, 7, "step"),
        line(288.3, 72, 3, "<module>"),
    ],
    "types": {"parameters": {"float32": mib(288.3)}, "optimizer": {"float32": mib(576.61)}},
    "forward_types": {"float32": 1},
    "batch": 256,
    "fitting_batch": 46,
    "steps": [
        step(16, 2.69 * 1024, 2.8 * 1024, 1.5 * 1024),
        step(8, 1.8 * 1024, 1.86 * 1024, 1.49 * 1024),
        step(12, 2.25 * 1024, 2.33 * 1024, 1.49 * 1024),
        step(None, 6.29 * 1024, finished=False),
    ],
}
KEPT = [step(16, 1, 1, 1, parameters=288.3, gradients=320.3)]


@pytest.mark.parametrize(
    ("section", "flight"),
    [
        ("It grows with every epoch", FLIGHT),
        ("A missing `zero_grad()`", {**FLIGHT, "steps": KEPT}),
        ("The batch is too big", FLIGHT),
        ("Is mixed precision on?", FLIGHT),
    ],
)
def test_what_a_report_says_is_real(section: str, flight: dict[str, Any]) -> None:
    """Each line of a report on the page is what the agent writes for these figures."""
    facts = {
        "framework": "torch", "verdict": "too_big", "requested": mib(768), "missing": mib(49.12),
        "limited": True, "capacity": mib(6.99 * 1024), "gradients_kept": True, "autocast": "off",
        "flight": flight,
    }  # fmt: skip
    page = (DOCS / "PROBLEMS.md").read_text(encoding="utf-8")
    text = page.partition(f"## {section}\n")[2].partition("\n## ")[0]
    sample = [each.removeprefix("    ") for each in text.splitlines() if each.startswith("    ")]
    printed = format_report(facts).splitlines()

    assert sample
    assert [each for each in sample if each not in printed] == []
