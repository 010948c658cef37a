"""Write alerts/*.rules.yml and alerts/rules.json from the sources in this folder and alerts/thresholds.yml.

A source is a Prometheus rule file with ``<<name>>`` in place of a threshold. Where owners may have thresholds
of their own, the selectors of the expression contain ``<<owner_matchers>>``: it becomes the matchers that
separate the owners, and the expression is written once for each of them, joined by ``or``. A recording rule
that serves the rules of all owners contains ``<<least_name>>``: the smallest value of all owners. Text that
several rules share is in snippets.yml, by the name that rules write as ``<<name>>``. The setting that a
framework's program should use comes from the framework's declaration (:func:`framework_snippets`).

Each alert gets a link to its runbook, which the exporter of that alert serves. If that exporter cannot
answer, ``runbook_from`` in the rule is a query that finds another one.

    python alerts/src/generate.py [--check]
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vramledger.agent_protocol.frameworks import FRAMEWORKS

SOURCES = Path(__file__).parent
ALERTS = SOURCES.parent
THRESHOLDS = ALERTS / "thresholds.yml"
SNIPPETS = SOURCES / "snippets.yml"

ALL_RULES = ALERTS / "rules.json"
"""All groups in one file, for deploy/mixin: older versions of jsonnet cannot read our YAML."""

Thresholds = Mapping[str, float | str]

_PLACEHOLDER = re.compile(r"<<(\w+)>>")
_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(\w+)")
MATCHABLE = ("owner", "owner_type", "user", "command", "framework", "policy", "namespace", "notebook")
"""Labels of a holding's owner that an override may match on."""

HEADER = "# Written by `make alerts` from src/{source} and thresholds.yml: change those, not this file.\n"


class Override(NamedTuple):
    """An owner with thresholds of its own; with the threshold ``never`` the alert ignores this owner."""

    label: str
    pattern: str
    thresholds: Thresholds


class Settings(NamedTuple):
    """The content of thresholds.yml, in base units."""

    job: str
    labels: tuple[str, ...]
    fault_xids: str
    runbooks: str
    grafana: str
    pages: str
    defaults: Thresholds
    overrides: tuple[Override, ...]
    budgets: tuple[Mapping[str, Any], ...]


def parse_quantity(value: object) -> float | str:
    """Return a threshold in base units: ``10GiB`` in bytes, ``1h`` in seconds; ``never`` stays.

    Raises:
        ValueError: it is not a number, size, duration or ``never``.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    if value == "never":
        return "never"
    units = {**_BYTES, **_SECONDS}
    found = _QUANTITY.fullmatch(str(value))
    if found is None or found[2] not in units:
        message = (
            f"{value!r} is not a threshold; write a number, a size (10GiB), a duration (30m, 1h) or never"
        )
        raise ValueError(message)
    number = float(found[1]) * units[found[2]]
    return int(number) if number.is_integer() else number


def read_settings(path: Path) -> Settings:
    """Read and validate thresholds.yml.

    Raises:
        ValueError: a value, a matcher or a name in it cannot be used.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    defaults = {name: parse_quantity(value) for name, value in content["defaults"].items()}
    overrides = []
    for entry in content.get("owners") or ():
        given = {
            name: parse_quantity(value) for name, value in entry.items() if name not in ("name", "match")
        }
        unknown = sorted(given.keys() - defaults.keys())
        if unknown or len(entry["match"]) != 1 or not set(entry["match"]) <= set(MATCHABLE):
            message = (
                f"owner {entry.get('name')!r}: match on one of {', '.join(MATCHABLE)}; unknown: {unknown}"
            )
            raise ValueError(message)
        [(label, pattern)] = entry["match"].items()
        overrides.append(Override(label, str(pattern), given))
    budgets = [{**entry, "bytes": parse_quantity(entry["bytes"])} for entry in content.get("budgets") or ()]
    runbooks = str(content["runbooks"])
    if others := set(re.findall(r"\{(\w*)\}", runbooks)) - {"instance", "alert"}:
        message = f"runbooks: only {{instance}} and {{alert}} are filled in; unknown: {sorted(others)}"
        raise ValueError(message)
    labels = tuple(content.get("labels") or ())
    if unusable := [each for each in labels if not re.fullmatch(r"[a-zA-Z_]\w*", str(each))]:
        message = f"labels: {unusable} cannot be names of labels"
        raise ValueError(message)
    xids = str(content.get("fault_xids") or "")
    grafana = str(content.get("grafana") or "")
    pages = str(content.get("pages") or "")
    if others := set(re.findall(r"\{(\w*)\}", pages)) - {"instance"}:
        message = f"pages: only {{instance}} is filled in; unknown: {sorted(others)}"
        raise ValueError(message)
    return Settings(
        content["job"], labels, xids, runbooks, grafana, pages, defaults, tuple(overrides), tuple(budgets)
    )


def least_thresholds(settings: Settings) -> dict[str, object]:
    """Return the smallest value of each threshold over all owners, by ``least_`` and its name.

    Skip ``never``.
    """
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

        Raises:
            ValueError: a snippet uses itself or one below it, or has the name of something else.
        """
        self._expanded = dict(given)
        self._used = set(given)
        for name, text in texts.items():
            if name in reserved:
                message = f"snippet {name!r} has the name of a threshold; give it another one"
                raise ValueError(message)
            expanded = self.expand(text.strip())
            if below := sorted(texts.keys() & _PLACEHOLDER.findall(expanded)):
                message = f"snippet {name!r} uses {below}: a snippet may only use those above it"
                raise ValueError(message)
            self._expanded[name] = expanded

    def expand(self, text: str) -> str:
        """Replace the names of snippets by their texts; other names stay."""
        self._used.update(_PLACEHOLDER.findall(text))
        return _PLACEHOLDER.sub(lambda found: self._expanded.get(found[1], found[0]), text)

    def unused(self) -> list[str]:
        """Return the names of the snippets that nothing has used."""
        return sorted(self._expanded.keys() - self._used)


def framework_snippets() -> dict[str, str]:
    """Return what the frameworks' declarations recommend, as snippets for an alert with that label.

    ``next_start`` is for a framework that takes its memory at its start, ``free_cache`` for one that caches.
    """
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
    "1d": ("a day", 86400),
    "6d": ("6 days", 518400),
}
"""The spans over which growth is recorded, in words and in seconds; the first that has a value is shown."""


def growth_snippet() -> dict[str, str]:
    """Return a snippet that says by how much a holding grew in which span, and when it fills the GPU."""
    holding = "{<<this>>,uuid=%q,pid=%q,source=%q}"
    labels = "<<these>> $labels.uuid $labels.pid $labels.source"
    text = "{{ $value | humanize1024 }}B"
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


def read_sources(settings: Settings) -> dict[Path, dict[str, Any]]:
    """Read every source of rules, with its snippets inserted.

    Raises:
        ValueError: a snippet cannot be used, or is not used.
    """
    paths = sorted(path for path in SOURCES.glob("*.yml") if path != SNIPPETS)
    contents: dict[Path, dict[str, Any]] = {
        path: yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths
    }
    texts = yaml.safe_load(SNIPPETS.read_text(encoding="utf-8")) or {}
    with _naming_file("src/snippets.yml"):
        snippets = Snippets(
            texts,
            {*_expression_values(settings), "owner_matchers"},
            {**framework_snippets(), **growth_snippet()},
        )
        for content in contents.values():
            for group in content["groups"]:
                group["rules"] = [_expanded_rule(rule, snippets) for rule in group["rules"]]
        if unused := snippets.unused():
            message = f"no rule uses the snippets {unused}; remove them"
            raise ValueError(message)
    return contents


def _expanded_rule(rule: dict[str, Any], snippets: Snippets) -> dict[str, Any]:
    """Return a rule with snippets in its expression and annotations."""
    expanded = {**rule, "expr": snippets.expand(rule["expr"])}
    if "annotations" in rule:
        expanded["annotations"] = {name: snippets.expand(text) for name, text in rule["annotations"].items()}
    return expanded


@contextmanager
def _naming_file(file: str) -> Iterator[None]:
    """Prefix an error with the name of the file that is being read."""
    try:
        yield
    except ValueError as error:
        message = f"{file}: {error}"
        raise ValueError(message) from error


def fill_in(text: str, values: Mapping[str, object]) -> str:
    """Replace ``<<name>>`` by values.

    Raises:
        ValueError: a name has no value.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            message = (
                f"<<{found[1]}>> is neither a threshold of thresholds.yml nor a snippet of src/snippets.yml"
            )
            raise ValueError(message)
        return str(values[found[1]])

    return _PLACEHOLDER.sub(value, text)


def _expression_values(settings: Settings) -> dict[str, object]:
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
        "job": settings.job,
        "fault_xids": settings.fault_xids,
        "target": ", ".join(target),
        "fleet": ", ".join(fleet),
        "this": ",".join(f"{label}=%q" for label in target),
        "these": " ".join(f"$labels.{label}" for label in target),
        "this_fleet": ",".join(f"{label}=%q" for label in fleet),
        "these_fleet": " ".join(f"$labels.{label}" for label in fleet),
    }


def render_expression(source: str, settings: Settings) -> str:
    """Return an expression with its thresholds, with a branch for each owner that has other ones."""
    values = _expression_values(settings)
    used = set(_PLACEHOLDER.findall(source))
    if "owner_matchers" not in used:
        return fill_in(source, values)
    concerned = [override for override in settings.overrides if used & override.thresholds.keys()]
    branches = [(_owner_matchers(concerned, None), values)]
    for index, override in enumerate(concerned):
        own = {**values, **{name: override.thresholds[name] for name in used & override.thresholds.keys()}}
        branches.append((_owner_matchers(concerned[:index], override), own))
    written = [
        fill_in(source, {**own, "owner_matchers": matchers}).rstrip()
        for matchers, own in branches
        if not any(own.get(name) == "never" for name in used)
    ]
    if len(written) == 1:
        return written[0] + "\n"
    return "\nor\n".join(f"(\n{_indent(branch)}\n)" for branch in written) + "\n"


def _owner_matchers(before: Sequence[Override], own: Override | None) -> str:
    """Return label matchers, each after a comma, that match what ``own`` and none of ``before`` matches."""
    mine = f', {own.label}=~"{own.pattern}"' if own else ""
    return mine + "".join(f', {other.label}!~"{other.pattern}"' for other in before)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in text.splitlines())


def render_rule(rule: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a rule of a source as Prometheus reads it."""
    result = {**rule, "expr": render_expression(rule["expr"], settings)}
    if "alert" in rule:
        annotations = {name: " ".join(text.split()) for name, text in rule["annotations"].items()}
        filled = {name: fill_in(text, _expression_values(settings)) for name, text in annotations.items()}
        about_node = "runbook_from" not in filled
        url = runbook_url(rule["alert"], settings.runbooks, filled.pop("runbook_from", None))
        result["annotations"] = {**filled, "runbook_url": url}
        if settings.pages and about_node:
            place = settings.pages.replace("{instance}", "{{ $labels.instance }}")
            url = fill_in(_PAGE_URL.replace("{page}", place), _expression_values(settings))
            result["annotations"]["page_url"] = url
        if settings.grafana:
            result["annotations"]["dashboard_url"] = dashboard_url(
                rule["alert"], filled["description"], settings
            )
    return result


_PAGE_URL = (
    '{{ with printf "vramledger_storage_newest_timestamp_seconds{<<this>>}" <<these>> | query }}{page}#at='
    '{{ with query "time()" }}{{ . | first | value | printf "%.0f" }}{{ end }}{{ end }}'
)
"""The template of an alert's link to the exporter's page as it is at this evaluation; empty where the
exporter keeps no past."""


def dashboard_url(alert: str, description: str, settings: Settings) -> str:
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
    used = [*settings.labels, "job", *(each for each in variables if each in named or each == "uuid")]
    query = "&".join(f"var-{each}={{{{ $labels.{each} | urlquery }}}}" for each in used)
    return f"{settings.grafana}/d/vramledger-{uid}?{query}"


def runbook_url(alert: str, place: str, query: str | None) -> str:
    """Return the template of an alert's link to its runbook.

    Args:
        alert: the name of the alert.
        place: the address of runbooks, with ``{alert}`` and perhaps ``{instance}``.
        query: finds an exporter that answers, if the alert's own label does not name one; without a result
            the link is empty.
    """
    page = place.replace("{alert}", alert)
    if "{instance}" not in page:
        return page
    if query is None:
        return page.replace("{instance}", "{{ $labels.instance }}")
    found = page.replace("{instance}", '{{ . | first | label "instance" }}')
    return f"{{{{ with query `{query}` }}}}{found}{{{{ end }}}}"


def budget_rules(settings: Settings) -> list[dict[str, Any]]:
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


def _represent_text(writer: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return writer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Writer.add_representer(str, _represent_text)


def render_file(source: Path, content: dict[str, Any], settings: Settings) -> str:
    """Return the rule file that follows from the content of a source."""
    groups = []
    for group in content["groups"]:
        rules = [render_rule(rule, settings) for rule in group["rules"]]
        if group["name"] == "vramledger-owners":
            rules += budget_rules(settings)
        groups.append({**group, "rules": rules})
    body = yaml.dump(
        {**content, "groups": groups}, Dumper=_Writer, sort_keys=False, width=10_000, allow_unicode=True
    )
    return HEADER.format(source=source.name) + body


def rendered_files() -> dict[Path, str]:
    """Return every rule file and its content.

    Raises:
        ValueError: a file cannot be used; the message begins with its name below alerts/.
    """
    with _naming_file("thresholds.yml"):
        settings = read_settings(THRESHOLDS)
    files = {}
    for source, content in read_sources(settings).items():
        with _naming_file(f"src/{source.name}"):
            files[ALERTS / f"{source.stem}.rules.yml"] = render_file(source, content, settings)
    groups = [group for text in files.values() for group in yaml.safe_load(text)["groups"]]
    files[ALL_RULES] = json.dumps({"groups": groups}, indent=1, ensure_ascii=False) + "\n"
    return files


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
        print(f"alerts/{error}", file=sys.stderr)
        return 2
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        if not check:
            path.write_text(files[path], encoding="utf-8")
        print(f"{'out of date' if check else 'wrote'}: alerts/{path.name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
