"""``vramledger rules``: render the alert rules for Prometheus from their sources and the thresholds.

A source is a rule file with ``<<name>>`` in place of a threshold. Where owners may have thresholds of their
own, the selectors have ``<<owner_matchers>>``: the expression is written once for each owner, joined by
``or``. A recording rule that serves all owners has ``<<least_name>>``, the smallest value of all. Text that
several rules share is in snippets.yml, or follows from the frameworks' declarations. Each alert links to its
runbook, which its exporter serves; if that cannot answer, the query ``runbook_from`` finds another one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from vramledger import __version__
from vramledger.commands.alert_settings import (
    HOME,
    SEVERITIES,
    Override,
    RuleSettings,
    add_thresholds,
    given_settings,
    naming_place,
    refused,
)
from vramledger_agent.commands.parser import Commands, add_log, write_output
from vramledger_agent.protocol.frameworks import FRAMEWORKS

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one by libyaml, where PyYAML has it, takes a tenth of the time."""

_PLACEHOLDER = re.compile(r"<<(\w+)>>")


def least_thresholds(settings: RuleSettings) -> dict[str, object]:
    """Return the smallest value of each threshold over all owners, by ``least_`` and its name."""
    given = [settings.defaults, *(override.thresholds for override in settings.overrides)]
    found: dict[str, object] = {}
    for name in settings.defaults:
        values = [each[name] for each in given if name in each]
        found[f"least_{name}"] = min(
            (value for value in values if not isinstance(value, str)), default=values[0]
        )
    return found


class Snippets:
    """Texts that several rules share, by name, and which of them have been used."""

    def __init__(
        self, texts: Mapping[str, str], reserved: Collection[str], given: Mapping[str, str] = {}
    ) -> None:
        """Take the snippets in the order of their file: one may use those above it, and the given ones.

        Raises ValueError if one uses itself or one below it, or has the name of something else.
        """
        self._expanded = dict(given)
        self._used = set(given)
        for name, text in texts.items():
            if name in reserved:
                raise ValueError(f"snippet {name!r} has the name of a threshold; give it another one")
            expanded = self.expand(text.strip())
            if below := sorted(texts.keys() & _PLACEHOLDER.findall(expanded)):
                raise ValueError(f"snippet {name!r} uses {below}: a snippet may only use those above it")
            self._expanded[name] = expanded

    def expand(self, text: str) -> str:
        """Replace the names of snippets by their texts; other names stay."""
        self._used.update(_PLACEHOLDER.findall(text))
        return _PLACEHOLDER.sub(lambda found: self._expanded.get(found[1], found[0]), text)

    def unused(self) -> list[str]:
        """Return the names of the snippets that nothing has used."""
        return sorted(self._expanded.keys() - self._used)


def framework_snippets() -> dict[str, str]:
    """Return what frameworks' declarations recommend: for ``next_start``, and to ``free_cache``."""
    chosen = {"next_start": ("preallocate", "fraction"), "free_cache": ("caching",)}
    unknown = {"next_start": "a limit, by its documentation", "free_cache": "empty its pool"}
    snippets = {}
    for name, policies in chosen.items():
        cases = [
            f'if eq $labels.framework "{framework.name}" }}}}{remedy}'
            for framework in FRAMEWORKS
            for policy, remedy in framework.remedies.items()
            if policy in policies
        ]
        snippets[name] = "{{ " + "{{ else ".join(cases) + "{{ else }}" + unknown[name] + "{{ end }}"
    return snippets


SPANS = {
    "30m": ("30 minutes", 1800),
    "6m": ("6 minutes", 360),
    "3h": ("3 hours", 10800),
    "12h": ("12 hours", 43200),
    "1d": ("a day", 86400),
    "6d": ("6 days", 518400),
}
"""The spans over which growth is recorded, in words and in seconds; the first that has a value is shown."""


def growth_snippet() -> dict[str, str]:
    """Return a snippet that says by how much a holding grew in which span, and when it fills the GPU."""
    holding = "{<<this>>,uuid=%q,pid=%q,source=%q}"
    labels = "<<these>> $labels.uuid $labels.pid $labels.source"
    text = "{{ $value | humanizePercentage }} of the GPU's memory"
    for span, (words, seconds) in reversed(SPANS.items()):
        growth = f"vramledger_process:demand_growth_bytes:delta{span}{holding}"
        free = "vramledger_device:memory_free_bytes:last{<<this>>,uuid=%q}"
        left = f"{seconds / 60:.0f} * {free} / on (<<target>>, uuid) {growth}"
        fills = (
            f'{{{{ with printf "60 * round({left})" <<these>> $labels.uuid {labels} | query }}}}'
            ", and fills the GPU in about {{ . | first | value | humanizeDuration }} at this pace{{ end }}"
        )
        text = (
            f'{{{{ with printf "{growth}" {labels} | query }}}}{{{{ . | first | value | humanize1024 }}}}B '
            f"in {words}{fills}{{{{ else }}}}{text}{{{{ end }}}}"
        )
    return {"growth_and_span": text}


def read_sources(settings: RuleSettings, home: Path = HOME) -> dict[Path, dict[str, Any]]:
    """Read every source of rules, with its snippets. Raises ValueError if one is unusable or unused."""
    shared = home / "src" / "snippets.yml"
    paths = sorted(path for path in shared.parent.glob("*.yml") if path != shared)
    contents: dict[Path, dict[str, Any]] = {
        path: yaml.load(path.read_text(encoding="utf-8"), _LOADER)  # noqa: S506 a safe one
        for path in paths
    }
    texts = yaml.load(shared.read_text(encoding="utf-8"), _LOADER) or {}  # noqa: S506
    with naming_place("src/snippets.yml"):
        snippets = Snippets(
            texts,
            {*_expression_values(settings), "owner_matchers"},
            {**framework_snippets(), **growth_snippet()},
        )
        for content in contents.values():
            for group in content["groups"]:
                group["rules"] = [_expanded_rule(rule, snippets) for rule in group["rules"]]
        if unused := snippets.unused():
            raise ValueError(f"no rule uses the snippets {unused}; remove them")
    return contents


def _expanded_rule(rule: dict[str, Any], snippets: Snippets) -> dict[str, Any]:
    expanded = {**rule, "expr": snippets.expand(rule["expr"])}
    if "annotations" in rule:
        expanded["annotations"] = {name: snippets.expand(text) for name, text in rule["annotations"].items()}
    return expanded


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Replace ``<<name>>`` by values. Raises ValueError if a name has none."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            raise ValueError(
                f"<<{found[1]}>> is neither a threshold of thresholds.yml nor a snippet of src/snippets.yml"
            )
        return str(values[found[1]])

    return _PLACEHOLDER.sub(value, text)


def _expression_values(settings: RuleSettings) -> dict[str, object]:
    """Return the values of the names in rules, where owners have no values of their own.

    ``target`` lists the labels that distinguish a node from every other, ``fleet`` those that all nodes of a
    fleet have in common; ``this`` and ``these`` are for a query in a text, about the node of the alert: its
    matchers as a format, and the values for them. ``this_fleet`` and ``these_fleet`` are the same for its
    fleet.
    """
    target = [*settings.labels, "job", "instance"]
    fleet = target[:-1]
    return {
        **settings.defaults,
        **least_thresholds(settings),
        "job": _quotable(settings.job),
        "fault_xids": _quotable(settings.fault_xids),
        "run": settings.run,
        **{f"severity_{name}": _quotable(text) for name, text in settings.severities.items()},
        "target": ", ".join(target),
        "fleet": ", ".join(fleet),
        "this": ",".join(f"{label}=%q" for label in target),
        "these": " ".join(f"$labels.{label}" for label in target),
        "this_fleet": ",".join(f"{label}=%q" for label in fleet),
        "these_fleet": " ".join(f"$labels.{label}" for label in fleet),
    }


def render_expression(source: str, settings: RuleSettings) -> str:
    """Return an expression with its thresholds, with a branch for each owner that has other ones."""
    values = _expression_values(settings)
    used = set(_PLACEHOLDER.findall(source))
    if "owner_matchers" not in used:
        return fill_in(source, values)
    concerned = [override for override in settings.overrides if used & override.thresholds.keys()]
    branches = [(_owner_matchers(concerned, None), values)]
    for index, override in enumerate(concerned):
        given = {name: override.thresholds[name] for name in used & override.thresholds.keys()}
        # A share that is never reached ends only its own comparison of several.
        never = {name: "Inf" for name in given if given[name] == "never" and name.endswith("_share")}
        own = {**values, **given, **never}
        branches.append((_owner_matchers(concerned[:index], override), own))
    written = [
        fill_in(source, {**own, "owner_matchers": matchers}).rstrip()
        for matchers, own in branches
        if not any(own.get(name) == "never" for name in used)
    ]
    if len(written) == 1:
        return written[0] + "\n"
    return "\nor\n".join(f"(\n{indent(branch, '  ')}\n)" for branch in written) + "\n"


def _owner_matchers(before: Sequence[Override], own: Override | None) -> str:
    """Return label matchers, each after a comma, that match what ``own`` and none of ``before`` matches."""
    mine = f', {own.label}=~"{_quotable(own.pattern)}"' if own else ""
    return mine + "".join(f', {other.label}!~"{_quotable(other.pattern)}"' for other in before)


def _quotable(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render_rule(rule: dict[str, Any], settings: RuleSettings) -> dict[str, Any]:
    """Return a rule of a source as Prometheus reads it."""
    values = _expression_values(settings)
    told = f'ALERTS{{alertname="{rule.get("alert")}", alertstate="firing"}}'
    expression = render_expression(rule["expr"].replace("<<told>>", told), settings)
    result = {**rule, "expr": selecting(with_prefix(expression, settings), settings.selector)}
    if "alert" in rule:
        result["alert"] = with_prefix(rule["alert"], settings)
        if "severity" in rule.get("labels", {}):
            severity = settings.severities[rule["labels"]["severity"]]
            result["labels"] = {
                name: with_prefix(value, settings)
                for name, value in (rule["labels"] | {"severity": severity}).items()
            }
        annotations = {name: " ".join(text.split()) for name, text in rule["annotations"].items()}
        filled = {
            name: _selecting_in_text(with_prefix(fill_in(text, values), settings), settings.selector)
            for name, text in annotations.items()
        }
        about_node = "runbook_from" not in filled
        other = filled.pop("runbook_from", None)
        url = runbook_url(result["alert"], settings.runbooks, other and selecting(other, settings.selector))
        result["annotations"] = {**filled, "runbook_url": url}
        if settings.pages and about_node:
            place = settings.pages.replace("{instance}", "{{ $labels.instance }}")
            url = fill_in(_PAGE_URL.replace("{page}", place), values)
            result["annotations"]["page_url"] = _selecting_in_text(url, settings.selector)
        if settings.grafana:
            # The description as it is written: in the settings' way to run a command any label may stand.
            about = annotations["description"]
            result["annotations"]["dashboard_url"] = dashboard_url(rule["alert"], about, settings)
    return result


_OURS = re.compile(r"\b(?=(?:Gpu|VramLedger)[A-Z.])")
_RAW = re.compile(
    r'(?<![\w:"|])((?:vramledger_[a-z0-9_]+|up|process_start_time_seconds)(?![\w:])\{?|\{(?=__name__))'
)
_QUERY = re.compile(r'(printf\s+")((?:[^"\\]|\\.)*)(")')


def with_prefix(text: str, settings: RuleSettings) -> str:
    """Return a text in which each of our alerts has the prefix that its name gets."""
    return _OURS.sub(settings.alert_prefix, text)


def selecting(query: str, selector: str) -> str:
    r"""Return a query in which each series of the exporters must match a selector too.

    >>> selecting("up == 1 and on (a) vramledger_up{b='1'} > vramledger_node:x:last", 'env="p"')
    'up{env="p"} == 1 and on (a) vramledger_up{env="p", b=\'1\'} > vramledger_node:x:last'
    """
    if not selector:
        return query
    return _RAW.sub(
        lambda found: f"{found[1]}{selector}, " if found[1].endswith("{") else f"{found[1]}{{{selector}}}",
        query,
    )


def _selecting_in_text(text: str, selector: str) -> str:
    """Do the same in the queries of a template."""
    escaped = selector.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return _QUERY.sub(lambda found: found[1] + selecting(found[2], escaped) + found[3], text)


def alertmanager_example(settings: RuleSettings, home: Path = HOME) -> str:
    """Return the example for Alertmanager, with the labels and the names that the rules have."""
    text = with_prefix((home / "alertmanager.yml").read_text(encoding="utf-8"), settings)
    page, warning, info, _ = (settings.severities[name] for name in SEVERITIES)
    if page not in {"page", "critical"}:
        text = text.replace('"page|critical"', f'"{page}"')
    text = text.replace('"warning|info"', f'"{warning}|{info}"').replace(
        "[severity = info]", f"[severity = {info}]"
    )
    listed = "".join(f"{label}, " for label in settings.labels)
    lists = re.compile(r"^ *(?:group_by|equal): .*$", re.MULTILINE)
    return lists.sub(
        lambda found: re.sub(r"\bcluster(?:, |(?=\]))", listed, found[0]).replace(", ]", "]"), text
    )


_PAGE_URL = (
    '{{ with printf "vramledger_storage_newest_timestamp_seconds{<<this>>}" <<these>> | query }}{page}#at='
    '{{ with query "time()" }}{{ . | first | value | printf "%.0f" }}{{ end }}{{ end }}'
)
"""The template of an alert's link to the exporter's page as it is at this evaluation; empty where the
exporter keeps no past."""


def dashboard_url(alert: str, description: str, settings: RuleSettings) -> str:
    """Return the template of an alert's link to the dashboard of what it is about, with its variables set.

    What an alert is about shows in the labels that its description uses. One that is about no node in
    particular, as the heartbeat, has no labels: empty variables would choose nothing.
    """
    named = set(re.findall(r"\$labels\.(\w+)", description))
    if not named:
        return f"{settings.grafana}/d/vramledger-exporter"
    if alert.startswith("VramLedger"):
        uid, variables = "exporter", ["instance"]
    elif "pid" in named:
        uid, variables = "process", ["instance", "pid"]
    elif "owner" in named:
        uid, variables = "owner", ["instance", "owner"]
    elif "gpu" in named:
        uid, variables = "device", ["instance", "uuid"]
    else:
        uid, variables = "node", ["instance"]
    used = ["job", *(each for each in variables if each in named or each == "uuid")]
    query = "&".join(f"var-{each}={{{{ $labels.{each} | urlquery }}}}" for each in used)
    # An external label is not there when a rule is evaluated: an empty variable would choose nothing.
    extra = "".join(
        f"{{{{ with $labels.{each} }}}}&var-{each}={{{{ . | urlquery }}}}{{{{ end }}}}"
        for each in settings.labels
    )
    return f"{settings.grafana}/d/vramledger-{uid}?{query}{extra}"


def runbook_url(alert: str, place: str, query: str | None) -> str:
    """Return the template of an alert's link to its runbook.

    ``query`` finds an exporter that answers, if the alert's label names none; without a result it is empty.
    """
    page = place.replace("{alert}", alert)
    if "{instance}" not in page:
        return page
    if query is None:
        return page.replace("{instance}", "{{ $labels.instance }}")
    found = page.replace("{instance}", '{{ . | first | label "instance" }}')
    return f"{{{{ with query `{query}` }}}}{found}{{{{ end }}}}"


def budget_rules(settings: RuleSettings) -> list[dict[str, Any]]:
    """Return the recording rules with the owners' budgets."""
    return [
        {
            "record": "vramledger_owner:memory_budget_bytes:threshold",
            "expr": f"vector({budget['bytes']})\n",
            "labels": {"owner_type": budget["owner_type"], "owner": budget["owner"]},
        }
        for budget in settings.budgets
    ]


class _Writer(yaml.SafeDumper):
    """Write YAML as people do: several lines as a block."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Writer.add_representer(str, _Writer.represent_str)


def render_file(content: dict[str, Any], settings: RuleSettings) -> dict[str, Any]:
    """Return the rule file that follows from the content of a source."""
    groups = []
    for group in content["groups"]:
        rules = [render_rule(rule, settings) for rule in group["rules"]]
        if group["name"] == "vramledger-owners":
            rules += budget_rules(settings)
        groups.append({**group, "rules": rules})
    return {**content, "groups": groups}


def rendered_files(settings: RuleSettings, home: Path = HOME) -> dict[str, dict[str, Any]]:
    """Return every rule file by the name of its source. Raises ValueError, which begins with that name."""
    files = {}
    sources = read_sources(settings, home)
    expressions = [
        rule["expr"] for each in sources.values() for group in each["groups"] for rule in group["rules"]
    ]
    names = [set(_PLACEHOLDER.findall(each)) for each in expressions]
    of_owners = set().union(*(each for each in names if "owner_matchers" in each))
    for override in settings.overrides:
        if vain := sorted(override.thresholds.keys() - of_owners):
            owner = f"owners: match: {override.label}: {override.pattern}"
            raise ValueError(f"{owner}: {', '.join(vain)}: no rule has it by owner")
    for source, content in sources.items():
        with naming_place(f"src/{source.name}"):
            files[source.stem] = render_file(content, settings)
    return files


def written(content: Mapping[str, Any]) -> str:
    """Return a rule file as YAML."""
    return yaml.dump(content, Dumper=_Writer, sort_keys=False, width=10_000, allow_unicode=True)


def add_command(commands: Commands) -> None:
    """Declare the command."""
    rules = commands.add_parser(
        "rules",
        help="write the alert rules for Prometheus, with your thresholds",
        description="Write all recording and alerting rules to standard output, as one file for Prometheus.",
    )
    which = rules.add_mutually_exclusive_group()
    add_thresholds(which)
    which.add_argument(
        "--defaults", action="store_true", help="write the default thresholds instead, each with its reason"
    )
    rules.add_argument(
        "--alertmanager", action="store_true",
        help="write Alertmanager's example instead, with the labels, severities and names of these rules",
    )  # fmt: skip
    add_log(rules)
    rules.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the rules, or the default thresholds."""
    if args.defaults:
        write_output((HOME / "thresholds.yml").read_text(encoding="utf-8"))
        return 0
    settings = given_settings(args.thresholds)
    try:
        if args.alertmanager:
            write_output(alertmanager_example(settings))
            return 0
        files = rendered_files(settings)
    except ValueError as error:
        raise refused(args.thresholds, error) from error
    groups = [group for content in files.values() for group in content["groups"]]
    head = f"# Written by 'vramledger rules', version {__version__}: change the thresholds, not this file.\n"
    write_output(head + written({"groups": groups}))
    return 0
