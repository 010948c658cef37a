"""The rule files: they are up to date, complete, documented, and use only the metric contract."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.alerts.promtool import ALERTS, RULE_FILES, rules
from tests.support.dashboards.files import all_queries
from tests.support.requirements import VERSIONS, require_version
from vramledger.cli import parser
from vramledger.commands.alert_settings import Override, given_settings, read_content, read_settings
from vramledger.commands.rules import read_sources, render_expression
from vramledger.metrics.contract import FAMILIES
from vramledger_agent.errors import VramledgerError

RULES = rules()
ALERTING = [rule for rule in RULES if "alert" in rule]
RECORDED = {rule["record"] for rule in RULES if "record" in rule} | {
    "vramledger_owner:memory_budget_bytes:threshold"
}
README = (ALERTS / "README.md").read_text(encoding="utf-8")

TARGET = {"cluster", "job", "instance"}
CONTRACT = {family.name: set(family.labels) for family in FAMILIES.values()}
OWN_LABELS = {
    "source", "rank_state", "blind", "told_by", "severity", "alertname", "team", "many", "span", "__name__",
    "step", "to", "blocker", "device",
}  # fmt: skip

HAPPENED = {"VramLedgerWatchdog", "GpuOutOfMemory", "GpuXidError", "GpuEccUncorrectable"}
"""What is true at once: the heartbeat, and errors that have happened."""

WAITED = re.compile(r"state_seconds:last\{|reserved_unused_since|offset 9m|\bALERTS\b")
"""What has lasted already: the age is measured, or the alerts that are counted have waited."""

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
            labels = {each.removeprefix("exported_") for each in labels}  # where the target's replace ours
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

        about_one = rule["labels"].get("holder") != "other" and not rule["alert"].startswith("GpuMany")
        told = rule["labels"]["severity"] in {"page", "warning"}
        if "memory_bytes:owned" in rule["expr"] and about_one and told:
            assert "pid" in description
            assert "abels.owner" in description
        of_exporter = rule["alert"].startswith("VramLedger")
        if rule["labels"]["severity"] == "page" and about_one and not of_exporter:
            assert "abels.pid" in description
            assert "humanize" in description

    def test_a_text_reads_labels_of_the_series(self, rule: dict[str, Any]) -> None:
        """A text reads no label that its own rule sets: Prometheus adds those after it wrote the text."""
        read = re.findall(r"abels\.(\w+)", " ".join(rule["annotations"].values()))

        assert not {*read} & set(rule["labels"])

    def test_waits_with_a_reason(self, rule: dict[str, Any]) -> None:
        """Only the heartbeat, what has happened and what has lasted fire immediately."""
        waits = rule.get("for", "0s") != "0s" or rule["alert"] in HAPPENED
        assert waits or WAITED.search(rule["expr"])

    def test_does_not_come_and_go(self, rule: dict[str, Any]) -> None:
        """Each alert has a hysteresis of its own, so that what flickers is said once."""
        # One target ends the second, which does not count as a flicker.
        steady = {"VramLedgerWatchdog", "VramLedgerAbsent"}
        assert "keep_firing_for" in rule or rule["alert"] in steady

    def test_readme_lists_it(self, rule: dict[str, Any]) -> None:
        """The table shows each alert with its severity and how long it waits."""
        name, waits = rule["alert"], rule.get("for", "0s")

        row = re.search(rf"^\| \[{name}\]\(runbooks/{name}\.md\) \|([^|]*)\|", README, re.MULTILINE)
        assert row is not None
        assert f"{rule['labels']['severity']} {waits}" in row[1].strip().split(", ")


def test_a_page_lists_the_records() -> None:
    """The records that dashboards may depend on exist, and all that ours read are among them."""
    records = (ALERTS / "RECORDS.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(vramledger_\w+:\w+:\w+)`", records))
    read = {name for asked in all_queries() for name in re.findall(r"vramledger_\w+:\w+:\w+", asked.expr)}

    assert read
    assert read <= listed <= RECORDED


def test_every_join_names_the_cluster() -> None:
    """Two clusters may have a node of one name; only what a budget is given for is the same in all."""
    joins = {found for rule in RULES for found in re.findall(r"\bon \(([^)]*)\)", rule["expr"])}

    assert joins - {"owner_type, owner"} == {each for each in joins if each.startswith("cluster, job")}


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


def test_a_wrong_threshold_of_the_repository_is_explained(tmp_path: Path) -> None:
    """The generator says in one line what is wrong in thresholds.yml; the command's errors are the same."""
    done = run_generator(tmp_path, "defaults: {hoarded_idle: 1 hour}\njob: x\nrunbooks: y", "", {})

    assert done.returncode == 2
    assert re.match(r"alerts/thresholds.yml: .*is not a threshold; write a number.*\n$", done.stderr)
    done = vramledger_rules("--thresholds", "-", given="words")
    assert (done.returncode, done.stdout) == (2, ""), "no rule is written"
    assert re.fullmatch(r"vramledger: standard input: 'words' has no keys.*\n", done.stderr)


def vramledger_rules(*arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vramledger", "rules", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, input=given)


OWN = r"""
defaults: {hoarded_idle: 2h}
owners:
  - {name: the night shift, match: {user: 'a\.b"c'}, hoarded_idle: never}
  - {name: services of the host, match: {owner_type: unit}, hardly_used_after: never}
budgets: [{owner_type: user, owner: ann, bytes: 20GiB}]
job: 'gpu "lab"'
"""


@pytest.mark.parametrize("version", VERSIONS)
def test_the_command_writes_rules_with_own_thresholds(version: str, tmp_path: Path) -> None:
    """A file says only what is other than the default; Prometheus' own check reads what comes out."""
    done = vramledger_rules("--thresholds", "-", given=OWN)
    assert (done.returncode, done.stderr) == (0, "")
    file = tmp_path / "rules.yml"
    file.write_text(done.stdout, encoding="utf-8")
    subprocess.run([require_version("promtool", version), "check", "rules", file], check=True)
    made = [rule for group in yaml.safe_load(done.stdout)["groups"] for rule in group["rules"]]
    (hoarded,) = (rule["expr"] for rule in made if rule.get("alert") == "GpuMemoryHoarded")

    assert len(made) == len(RULES) + 1, "all rules, and the budget"
    assert 'user!~"a\\\\.b\\"c"' in hoarded
    assert "7200" in hoarded, "two hours"
    assert "86400" not in hoarded, "services have another entry instead of ours"
    assert r'up{job="gpu \"lab\""}' in done.stdout


def test_without_a_file_the_command_writes_the_rules_of_the_repository() -> None:
    """The defaults that it prints, given as one's own, change nothing."""
    defaults = vramledger_rules("--defaults").stdout
    plain, given = vramledger_rules(), vramledger_rules("--thresholds", "-", given=defaults)
    groups = [each for path in RULE_FILES for each in yaml.safe_load(path.read_text("utf-8"))["groups"]]

    assert yaml.safe_load(plain.stdout)["groups"] == groups
    assert given.stdout == plain.stdout


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("defaults: {hoarded_idel: 1h}", "defaults: hoarded_idel: no such key; do you mean hoarded_idle?"),
        ("threshold: {hoarded_idle: 1h}", "threshold: no such key"),
        ("defaults: {hoarded_idle: 10GiB}", "defaults: hoarded_idle: '10GiB' is not a duration"),
        ("defaults: {hoarded_bytes: -5}", "defaults: hoarded_bytes: -5 is not a number of 0 or more"),
        ("defaults: {hoarded_share: 20}", "defaults: hoarded_share: 20 is not a share from 0 to 1"),
        ("defaults: {hoarded_idle: never}", "defaults: hoarded_idle: never is for an owner"),
        ("defaults: [1]", "defaults: [1] has no keys"),
        ("owners: {user: ann}", "owners: {'user': 'ann'} is not a list"),
        ("owners: [ann]", "owners[0]: 'ann' has no keys"),
        ("owners: [{name: x, hoarded_idle: 1d}]", "owners[0] (x): match: give one of owner, owner_type"),
        ("owners: [{match: {user: '('}}]", "owners[0]: match: user: '(' is not a regular expression"),
        ("owners: [{match: {user: '(?!a)'}}]", "owners[0]: match: user: '(?!a)' looks ahead"),
        ("owners: [{match: {user: a}, hoarded_idle: 1MiB}]", "owners[0]: hoarded_idle: '1MiB' is not"),
        ("owners: [{match: {user: a}, many_owners: 3}]", "owners: match: user: a: many_owners: no rule"),
        ("budgets: [{owner: ann, bytes: 1GiB}]", "budgets[0]: owner_type: missing"),
        ("severities: {critical: page}", "severities: critical: no such key"),
        ("labels: cluster", "labels: 'cluster' is not a list"),
        ("job: [a]", "job: ['a'] is not a text"),
        ("a: [", "it is not YAML"),
        ("defaults: {hoarded_idle: 1 hour}", "defaults: hoarded_idle: '1 hour' is not a threshold"),
        ("runbooks: 'http://{node}/{alert}'", "runbooks: "),
        ("alert_prefix: a b", "alert_prefix: 'a b' cannot be used; write it like Acme"),
        ("selector: '{a=1}'", "selector: '{a=1}' cannot be used; write it like"),
        ("owners: [{match: {owner: x}, b: 2}]", "owners[0]: b: no such key"),
        *(
            (f"owners: [{{match: {{{label}: x}}, hoarded_idle: 2}}]",
             f"every program chooses its own {label}, so it gives nobody another hoarded_idle")
            for label in ("command", "framework", "policy", "notebook")
        ),
    ],
)  # fmt: skip
def test_an_error_of_the_command_names_the_key(text: str, complaint: str, tmp_path: Path) -> None:
    """One line has the place in the file and what is allowed there."""
    file = tmp_path / "mine.yml"
    file.write_text(text, encoding="utf-8")
    args = parser().parse_args(["rules", "--thresholds", str(file)])
    with pytest.raises(VramledgerError, match=rf"\A{file}: .*\Z") as raised:
        args.run(args)

    assert complaint in str(raised.value)


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


def test_every_record_is_read() -> None:
    """A record that no other rule and no dashboard reads only costs."""
    boards = (ALERTS.parent / "dashboards").glob("*.json")
    read = {name for path in boards for name in re.findall(r"vramledger_\w+:[\w:]+", path.read_text("utf-8"))}
    for rule in RULES:
        found = {name for text in texts(rule) for name in re.findall(r"vramledger_\w+:[\w:]+", text)}
        read |= found - {rule.get("record")}

    assert {rule["record"] for rule in RULES if "record" in rule} - read == set()


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


def own_keys() -> dict[str, tuple[set[str], set[str]]]:
    """Return what the README says of each alert: an owner's keys, and those at which ``never`` excludes."""
    rows = re.findall(r"^\| (Gpu\w+) \| (`[^|]*`) \| (`\w+`|all) \|$", README, re.MULTILINE)
    return {
        name: (keys := {*re.findall(r"\w+", listed)}, keys if never == "all" else {never.strip("`")})
        for name, listed, never in rows
    }


def test_the_keys_of_an_owner_are_listed() -> None:
    """The README lists each alert that accepts an owner's thresholds, with the keys of its rules."""
    settings = given_settings(None)
    found: dict[str, set[str]] = {}
    for content in read_sources(settings).values():
        for rule in (rule for group in content["groups"] for rule in group["rules"]):
            used = set(re.findall(r"<<(\w+)>>", rule["expr"]))
            if "owner_matchers" in used:
                found.setdefault(rule["alert"], set()).update(used & settings.defaults.keys())

    assert {name: keys for name, (keys, _) in own_keys().items()} == found


@pytest.mark.parametrize("name", own_keys())
def test_never_excludes_the_owner(name: str) -> None:
    """With ``never`` at the keys that the README names, no rule of the alert can fire for the owner."""
    never = dict.fromkeys(own_keys()[name][1], "never")
    settings = given_settings(None)._replace(overrides=(Override("user", "ann", never),))
    for content in read_sources(settings).values():
        for rule in (rule for group in content["groups"] for rule in group["rules"]):
            if rule.get("alert") == name:
                others, *own = re.split(
                    r"^or$", render_expression(rule["expr"], settings), flags=re.MULTILINE
                )
                assert 'user!~"ann"' in others
                thresholds = [f"{each}>>" for each in never]
                left = [branch for branch in own if 'user=~"ann"' in branch]
                assert all(branch.count("Inf") == sum(map(rule["expr"].count, thresholds)) for branch in left)


def test_a_span_that_an_owner_leaves_out_leaves_the_others() -> None:
    """Growth of an owner with ``growth_medium_share: never`` still counts over the other spans."""
    text = (ALERTS / "thresholds.yml").read_text(encoding="utf-8")
    owner = '  - {name: x, match: {owner: "a/b"}, growth_medium_share: never}\n'
    content = read_content(text.replace("owners:\n", f"owners:\n{owner}"))
    source = "g{a!=''<<owner_matchers>>} >= <<growth_medium_share>> or g >= <<growth_fast_share>>"
    written = render_expression(source, read_settings(content))

    assert "g{a!='', owner=~\"a/b\"} >= Inf or g >= 0.05" in written
    assert "g{a!='', owner!~\"a/b\"} >= 0.02 or g >= 0.05" in written
