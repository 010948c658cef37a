"""The runbooks: they are complete, use commands that exist, and are served as they are written."""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import vramledger
from tests.support.alerts.promtool import ALERTS, alert_names, rules
from vramledger.cli import parser
from vramledger.metrics.contract import FAMILIES

PAGES = sorted(ALERTS.glob("runbooks/*.md"))
HEADINGS = ["What it means", "Is it real?", "What to do first", "When it is harmless"]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
GENERATOR = ALERTS / "src" / "runbooks.py"

COMMANDS = re.compile(
    r"vramledger|nvidia-smi|kubectl|systemctl|journalctl|promtool|amtool|docker|scontrol|dmesg|lspci|fuser|ps|ls"
    r"|kill|grep|curl|findmnt|timedatectl|chronyc|uptime|py-spy|python"
)
"""Programs that a runbook may tell a person to run."""


def sections(page: Path) -> dict[str, str]:
    title, *parts = re.split(r"^#+ (.*)\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert title == ""
    return dict(zip(parts[::2], parts[1::2], strict=True))


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_alert_has_a_runbook_and_every_runbook_an_alert() -> None:
    """Every alert's link leads to a runbook, and every runbook belongs to an alert."""
    assert {page.stem for page in PAGES} == set(alert_names())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.stem))
class TestRunbook:
    """The content that each runbook needs for a person at four in the morning."""

    def test_answers_four_questions(self, page: Path) -> None:
        """It says what the alert means, whether it is real, what to do first, and when it is harmless."""
        found = sections(page)

        assert list(found) == [page.stem, *HEADINGS]
        assert [heading for heading in HEADINGS if len(found[heading].split()) < 4] == []

    def test_says_what_to_do_in_steps(self, page: Path) -> None:
        """What to do first is a numbered list, with a command in it or before it."""
        found = sections(page)
        steps = re.findall(r"^(\d+)\. ", found["What to do first"], re.MULTILINE)
        typed = [
            each
            for each in code(found["Is it real?"] + found["What to do first"])
            if COMMANDS.fullmatch(each.split()[0])
        ]

        assert steps == [str(number) for number in range(1, len(steps) + 1)]
        assert steps
        assert typed

    def test_its_commands_exist(self, page: Path) -> None:
        """The program accepts each command of ours, with PID and similar words filled in."""
        for each in code(page.read_text(encoding="utf-8")):
            if each.startswith("vramledger "):
                words = [re.sub(r"^PID$", "7", word) for word in shlex.split(each.partition(" | ")[0])[1:]]
                parser().parse_args(words)  # it ends the test if it does not accept the command

    def test_its_metrics_exist(self, page: Path) -> None:
        """Each metric that it names is of the contract, or is recorded by the rules."""
        named = re.findall(r"\bvramledger_[\w:]+", page.read_text(encoding="utf-8"))

        assert set(named) - FAMILIES_NAMED - RECORDED == set()


FAMILIES_NAMED = {family.name for family in FAMILIES.values()} | {
    f"{family.name}_total" for family in FAMILIES.values()
}


def test_what_the_exporter_serves_is_up_to_date() -> None:
    """The pages in the package are what the runbooks make."""
    done = subprocess.run([sys.executable, GENERATOR, "--check"], check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


def convert(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Make the page of one runbook in a separate folder."""
    alerts = folder / "alerts"
    (alerts / "src").mkdir(parents=True)
    (alerts / "runbooks").mkdir()
    (folder / "exporter" / "vramledger" / "web" / "runbooks").mkdir(parents=True)
    (alerts / "src" / "runbooks.py").write_bytes(GENERATOR.read_bytes())
    (alerts / "runbooks" / "A.md").write_text(text, encoding="utf-8")
    rule = "groups: [{name: x, rules: [{alert: A, annotations: {summary: 'Less < more.'}}]}]"
    (alerts / "x.rules.yml").write_text(rule, encoding="utf-8")
    command = [sys.executable, str(alerts / "src" / "runbooks.py")]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_text_never_becomes_markup(tmp_path: Path) -> None:
    """HTML in a runbook, its code or its alert's summary is shown as text."""
    text = '# A\n\na <script> & `<b>` [see "it"](A.md)\n\n- one `x`\n- two\n\n1. first\n'
    convert(tmp_path, text).check_returncode()
    pages = tmp_path / "exporter" / "vramledger" / "web" / "runbooks"

    assert (pages / "A.html").read_text(encoding="utf-8") == (
        "<h2>A</h2>\n<p>a &lt;script&gt; &amp; <code>&lt;b&gt;</code> "
        '<a href="A">see &quot;it&quot;</a></p>\n'
        "<ul>\n<li>one <code>x</code></li>\n<li>two</li>\n</ul>\n<ol>\n<li>first</li>\n</ol>\n"
    )
    assert "Less &lt; more." in (pages / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("# B\n\ntext\n", "its first line must be '# A'"),
        ("# A\n\n**loud**\n", "Markdown that is not accepted: '**loud**'"),
        ("# A\n\n[x](http://example.org)\n", "Markdown that is not accepted"),
        ("# A\n\n- one\ntwo\n", "a list in which not every line is an item"),
        ("# A\n\n### deep\n", "Markdown that is not accepted"),
    ],
)
def test_other_markdown_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    """One line names the runbook and the Markdown that is not accepted; nothing is shown wrongly."""
    done = convert(tmp_path, text)

    assert done.returncode == 2
    assert done.stderr.startswith(f"alerts/runbooks/A.md: {complaint}")
    assert len(done.stderr.splitlines()) == 1


def test_quoted_messages_are_those_of_the_exporter() -> None:
    """A message of the exporter that a runbook quotes is in the exporter's code."""
    spans = code("\n".join(page.read_text(encoding="utf-8") for page in PAGES))
    # What follows a colon is the system's own text.
    quoted = {found[0] for span in spans if (found := re.match(r"(?:the|a) [a-z ]+(?=: |$)", span))}
    written = "\n".join(
        node.value
        for path in Path(vramledger.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

    assert len(quoted) >= 4
    assert {message for message in quoted if message not in written} == set()
