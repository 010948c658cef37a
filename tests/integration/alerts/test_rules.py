"""The rule files: they are up to date, complete, documented, and use only the metric contract."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.alerts.promtool import ALERTS, RULE_FILES, rules
from tests.support.requirements import VERSIONS, require_version
from vramledger.metrics.contract import FAMILIES

RULES = rules()
ALERTING = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule} | {
    "vramledger_owner:memory_budget_bytes:threshold"
}
README = (ALERTS / "README.md").read_text(encoding="utf-8")

TARGET = {"cluster", "job", "instance"}
CONTRACT = {family.name: set(family.labels) for family in FAMILIES.values()}
OWN_LABELS = {"source", "rank_state", "blind", "told_by", "severity", "alertname", "team"}

HAPPENED = {"VramLedgerWatchdog", "GpuOutOfMemory", "GpuXidError", "GpuEccUncorrectable"}
"""What is true at once: the heartbeat, and errors that have happened."""

_SELECTOR = re.compile(r"\b(vramledger_[\w:]+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_LABEL_LIST = re.compile(r"\b(?:on|by|without|ignoring|group_left|group_right)\s*\(([^)]*)\)")


def texts(rule: dict[str, Any]) -> Iterator[str]:
    """Return the expression of a rule and the queries in its annotations."""
    yield rule["expr"]
    for text in rule.get("annotations", {}).values():
        yield from re.findall(r'printf\s+"([^"]*)"', text)


def test_rule_files_are_up_to_date() -> None:
    """The rule files are what the sources and the thresholds make."""
    command = [sys.executable, str(ALERTS / "src" / "generate.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_accepts_the_rules(version: str) -> None:
    """Prometheus loads every file."""
    promtool = require_version("promtool", version)
    subprocess.run([promtool, "check", "rules", *RULE_FILES], check=True, capture_output=True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_only_the_contract_is_used(rule: dict[str, Any]) -> None:
    """Each metric and label is of the contract or recorded here; a misspelt one would never match."""
    known = TARGET.union(OWN_LABELS, *CONTRACT.values())
    for text in texts(rule):
        for name, matchers in _SELECTOR.findall(text):
            assert name in CONTRACT or name in RECORDED or name == "up"
            labels = set(_MATCHER.findall(matchers))
            assert labels <= (CONTRACT[name] | TARGET if name in CONTRACT else known)
        listed = {label for found in _LABEL_LIST.findall(text) for label in re.findall(r"\w+", found)}
        assert listed <= known


@pytest.mark.parametrize("rule", ALERTING, ids=lambda rule: f"{rule['alert']}-{rule['labels']['severity']}")
class TestAlert:
    """The text that each alert needs for the person that it disturbs."""

    def test_labels_are_fixed(self, rule: dict[str, Any]) -> None:
        """A value in a label would make a new alert at each evaluation, and its ``for`` would never pass."""
        assert rule["labels"]["severity"] in {"page", "warning", "info", "none"}
        assert not [value for value in rule["labels"].values() if "{{" in value]

    def test_annotations_are_complete(self, rule: dict[str, Any]) -> None:
        """An alert has a fixed summary, a description with figures, and a runbook that says what to do."""
        annotations = rule["annotations"]

        link = set() if "{{ with query" in annotations["runbook_url"] else {"page_url"}
        assert set(annotations) == {"summary", "description", "runbook_url", "dashboard_url"} | link
        assert "{{" not in annotations["summary"]
        assert annotations["summary"].endswith(".")
        assert annotations["description"].endswith(".")
        assert f"/runbooks/{rule['alert']}" in annotations["runbook_url"]

    def test_description_names_who_and_how_much(self, rule: dict[str, Any]) -> None:
        """A page about a holding names its pid and owner, and has figures that people can read."""
        description = rule["annotations"]["description"]

        if "memory_bytes:owned" in rule["expr"] and rule["labels"]["severity"] in {"page", "warning"}:
            assert "pid" in description
            assert "abels.owner" in description
        if rule["labels"]["severity"] == "page" and not rule["alert"].startswith("VramLedger"):
            assert "abels.pid" in description
            assert "humanize" in description

    def test_a_text_reads_labels_of_the_series(self, rule: dict[str, Any]) -> None:
        """A text reads no label that its own rule sets: Prometheus adds those after it wrote the text."""
        read = re.findall(r"abels\.(\w+)", " ".join(rule["annotations"].values()))

        assert not {*read} & set(rule["labels"])

    def test_waits_with_a_reason(self, rule: dict[str, Any]) -> None:
        """Only the heartbeat and an event that has already happened fire immediately."""
        assert rule.get("for", "0s") != "0s" or rule["alert"] in HAPPENED

    def test_readme_lists_it(self, rule: dict[str, Any]) -> None:
        """The table shows each alert with its severity and how long it waits."""
        name, waits = rule["alert"], rule.get("for", "0s")

        assert f"| [{name}](runbooks/{name}.md) | {rule['labels']['severity']} | {waits} |" in README


def test_links_between_runbooks_lead_somewhere() -> None:
    """Every link leads to a file that exists."""
    pages = [*ALERTS.glob("runbooks/*.md"), ALERTS / "README.md"]
    broken = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([\w/]+\.md)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]

    assert broken == []


def test_readme_lists_the_recordings() -> None:
    """Dashboards may depend on the recording rules in the table, so the table has exactly these."""
    assert set(re.findall(r"`(vramledger_\w+:\w+:\w+)`", README)) == RECORDED


def test_alerts_follow_the_records_of_their_group() -> None:
    """An alert reads what its group recorded in the same round, not what it recorded in the round before."""
    places = {(rule["group"], rule.get("record")): place for place, rule in enumerate(RULES)}
    late = [
        (rule["alert"], name)
        for place, rule in enumerate(RULES)
        if "alert" in rule
        for name in re.findall(r"\bvramledger_\w+:\w+:\w+", rule["expr"])
        if places.get((rule["group"], name), -1) > place
    ]

    assert late == []


def test_groups_and_recordings_have_good_names() -> None:
    """Group names are unique over the files, and recordings are called level:metric:operation."""
    groups = {(rule["file"], rule["group"]) for rule in RULES}

    assert len({group for _, group in groups}) == len(groups)
    assert [name for name in RECORDED if not re.fullmatch(r"vramledger_\w+:\w+:\w+", name)] == []


def run_generator(
    folder: Path, thresholds: str, snippets: str, sources: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run the generator in a separate folder, with these files."""
    (folder / "src").mkdir()
    generator = folder / "src" / "generate.py"
    generator.write_bytes((ALERTS / "src" / "generate.py").read_bytes())
    (folder / "thresholds.yml").write_text(thresholds, encoding="utf-8")
    (folder / "src" / "snippets.yml").write_text(snippets, encoding="utf-8")
    for name, text in sources.items():
        (folder / "src" / name).write_text(text, encoding="utf-8")
    return subprocess.run([sys.executable, generator], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("runbooks", "about", "url"),
    [
        ("http://{instance}/runbooks/{alert}", "", "http://{{ $labels.instance }}/runbooks/Full"),
        ("https://wiki.test/{alert}", "runbook_from: up", "https://wiki.test/Full"),
        (
            "https://{instance}/runbooks/{alert}",
            "runbook_from: up",
            '{{ with query `up` }}https://{{ . | first | label "instance" }}/runbooks/Full{{ end }}',
        ),
    ],
    ids=["the exporter's own", "another place", "of an exporter that answers"],
)
def test_the_link_to_the_runbook_is_a_setting(tmp_path: Path, runbooks: str, about: str, url: str) -> None:
    """thresholds.yml says where links lead: scheme, address and path; a rule may name another exporter."""
    thresholds = f"job: j\nrunbooks: {runbooks}\ndefaults: {{}}\n"
    source = (
        f"groups: [{{name: x, rules: [{{alert: Full, expr: m, annotations: {{summary: Full., {about}}}}}]}}]"
    )
    run_generator(tmp_path, thresholds, "", {"x.yml": source}).check_returncode()
    written = yaml.safe_load((tmp_path / "x.rules.yml").read_text(encoding="utf-8"))

    assert written["groups"][0]["rules"][0]["annotations"] == {"summary": "Full.", "runbook_url": url}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("defaults: {}\njob: x\nrunbooks: http://{node}/{alert}", "unknown: ['node']"),
        ("defaults: {hoarded_idle: 1 hour}\njob: x\nrunbooks: y", "is not a threshold; write a number"),
        ("defaults: {a: 1}\nowners: [{match: {pid: x}, a: 2}]\njob: x\nrunbooks: y", "match on one of"),
        ("defaults: {a: 1}\nowners: [{match: {owner: x}, b: 2}]\njob: x\nrunbooks: y", "unknown: ['b']"),
    ],
)
def test_a_wrong_threshold_is_explained(text: str, complaint: str, tmp_path: Path) -> None:
    """One line says what is wrong in thresholds.yml and what is allowed there."""
    done = run_generator(tmp_path, text, "", {})

    assert done.returncode == 2
    assert done.stderr.startswith("alerts/thresholds.yml: ")
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


RULE = """
groups:
  - name: x
    rules:
      - alert: Full
        expr: m > <<big>>
        annotations:
          summary: Full.
          description: >-
            {{ $labels.instance }}:   <<who>>
            is full.
"""


def test_a_snippet_stands_for_its_text(tmp_path: Path) -> None:
    """A rule gets the text of a snippet, with the snippets and the thresholds in it."""
    snippets = "pid: pid {{ $labels.pid }}\nwho: >-\n  <<pid>>\n  above <<big>>B\n"
    thresholds = "job: j\nrunbooks: r\ndefaults: {big: 1KiB}\n"
    done = run_generator(tmp_path, thresholds, snippets, {"x.yml": RULE})
    written = yaml.safe_load((tmp_path / "x.rules.yml").read_text(encoding="utf-8"))
    [rule] = written["groups"][0]["rules"]

    assert (done.returncode, done.stdout) == (0, "wrote: alerts/x.rules.yml\nwrote: alerts/rules.json\n")
    assert rule["annotations"]["description"] == (
        "{{ $labels.instance }}: pid {{ $labels.pid }} above 1024B is full."
    )
    assert rule["expr"] == "m > 1024"


@pytest.mark.parametrize(
    ("snippets", "complaint"),
    [
        ("", "src/x.yml: <<who>> is neither a threshold of thresholds.yml nor a snippet"),
        ("who: a\nunused: b\n", "src/snippets.yml: no rule uses the snippets ['unused']"),
        ("who: <<pid>>\npid: b\n", "src/snippets.yml: snippet 'who' uses ['pid']: a snippet may only use"),
        ("who: again <<who>>\n", "src/snippets.yml: snippet 'who' uses ['who']: a snippet may only use"),
        ("who: a\nbig: b\n", "src/snippets.yml: snippet 'big' has the name of a threshold"),
    ],
)
def test_a_wrong_snippet_is_explained(snippets: str, complaint: str, tmp_path: Path) -> None:
    """One line names the snippet that is missing, unused or out of order, and no file is written."""
    done = run_generator(tmp_path, "job: j\nrunbooks: r\ndefaults: {big: 1}\n", snippets, {"x.yml": RULE})

    assert done.returncode == 2
    assert done.stderr.startswith(f"alerts/{complaint}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x.rules.yml").exists()


def test_an_owner_gets_a_branch_of_its_own(tmp_path: Path) -> None:
    """Other owners keep the default, a matching owner has its own threshold, and ``never`` excludes it."""
    source = 'groups: [{name: x, rules: [{record: "a:b:c", expr: \'m{s="i"<<owner_matchers>>} > <<big>>\'}]}]'
    owners = "owners: [{match: {owner: a}, big: 2GiB}, {match: {user: b}, big: never}]"
    thresholds = f"job: j\nrunbooks: r\ndefaults: {{big: 1KiB}}\n{owners}\n"
    run_generator(tmp_path, thresholds, "", {"x.yml": source}).check_returncode()
    written = (tmp_path / "x.rules.yml").read_text(encoding="utf-8")

    assert 'm{s="i", owner!~"a", user!~"b"} > 1024' in written
    assert 'm{s="i", owner=~"a"} > 2147483648' in written
    assert "never" not in written


def test_what_is_recorded_reaches_the_least_that_an_owner_has(tmp_path: Path) -> None:
    """An owner may have a threshold below the default: the recording rules then use the smaller one."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ALERTS / "src").glob("*.yml")}
    settings = yaml.safe_load((ALERTS / "thresholds.yml").read_text(encoding="utf-8"))
    settings["owners"] = [
        {"match": {"owner": "careful"}, "growth_medium_share": 0.002},
        {"match": {"owner": "careless"}, "growth_medium_share": "never", "growth_slow_share": 0.5},
    ]
    snippets = sources.pop("snippets.yml")
    run_generator(tmp_path, yaml.safe_dump(settings), snippets, sources).check_returncode()
    written = (tmp_path / "recording.rules.yml").read_text(encoding="utf-8")

    assert re.findall(r"\((\S+) / 5 \*", written) == ["0.05", "0.002", "0.002", "0.02"]
