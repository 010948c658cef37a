"""The README is short and true: its length, its commands, its files, its list of states."""

import re
import subprocess
import sys
from pathlib import Path

from tests.support.requirements import require_tool
from vramledger.cli import parser
from vramledger.model.snapshot import State

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"^ {4}\S.*$|^```.*?^```$|(?<!`)`[^`\n]+`(?!`)", README, re.MULTILINE | re.DOTALL)
"""Indented lines, fenced blocks and code spans."""


def test_it_is_short() -> None:
    """A reader needs five minutes: at most 1,000 words, as ``wc -w`` counts them."""
    assert len(README.split()) <= 1000


def test_every_command_can_be_called() -> None:
    """The program accepts every command line with ``vramledger``."""
    lines = re.findall(r"^ {4}vramledger (.*?)(?: {2,}#.*)?$", README, re.MULTILINE)
    assert {line.split()[0] for line in lines} >= {"serve", "show", "doctor", "run"}
    for line in lines:
        parser().parse_args(line.split())  # ends by SystemExit when it does not


def test_every_target_exists() -> None:
    """Every ``make`` command is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for code in CODE for name in re.findall(r"\bmake ([a-z-]+)", code)}
    assert named >= {"run", "test"}
    assert named <= targets


def test_every_file_of_a_command_exists() -> None:
    """Every path of the repository in code leads to a file."""
    paths = {path for code in CODE for path in re.findall(r"(?<![\w/])(?:deploy|alerts)/[\w./*-]+", code)}
    assert len(paths) >= 5
    assert {path for path in paths if not any(ROOT.glob(path.rstrip("/")))} == set()


def test_its_scrape_configuration_is_valid(tmp_path: Path) -> None:
    """Prometheus accepts the block of YAML as its configuration, with the rules beside it."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (tmp_path / "prometheus.yml").write_text(block, encoding="utf-8")
    rules = subprocess.run([sys.executable, "-m", "vramledger", "rules"], check=True, capture_output=True)
    (tmp_path / "vramledger.rules.yml").write_bytes(rules.stdout)
    command = [str(require_tool("promtool")), "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rules found" in done.stdout


def test_its_states_are_those_of_the_ledger() -> None:
    """The table of states has every state, in the order in which they apply."""
    assert re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE) == [state.value for state in State]


def test_it_counts_the_alerts() -> None:
    """The README names the true number of alerts, in the text and in the comparison."""
    rules = [path.read_text(encoding="utf-8") for path in (ROOT / "alerts").glob("*.rules.yml")]
    names = set(re.findall(r"^ *- alert: (\w+)$", "\n".join(rules), re.MULTILINE))
    assert f"{len(names)} [alerts](alerts/README.md)" in README
    assert re.findall(r"^\| alert.*?\| (\d+)", README, re.MULTILINE) == [str(len(names))]
