"""Read thresholds.yml, with owners' own thresholds; an error names the key that cannot be used."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from vramledger.errors import StartupError, UsageError

_PACKAGE = Path(__file__).parents[1]
HOME = next(home for home in (_PACKAGE / "alerts", _PACKAGE.parents[1] / "alerts") if home.is_dir())
"""The folder of thresholds.yml and src/: in the package, and in a checkout at the top."""

Thresholds = Mapping[str, float | str]

_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_UNITS = {**_BYTES, **_SECONDS}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(\w+)")
ATTESTED = ("owner", "owner_type", "user", "namespace")
"""Labels of a holding that the kernel or who administers decides; an override may match on them."""

DECLARED = ("command", "framework", "policy", "notebook")
"""Labels that a program chooses for itself, by a variable, its command line or a mapped file."""

OWN_TROUBLE = re.compile("(growth|hung)_.*")
"""Thresholds for what harms the program itself: only these may depend on what it says of itself."""


class Override(NamedTuple):
    """An owner with thresholds of its own; with the threshold ``never`` the alert ignores this owner."""

    label: str
    pattern: str
    thresholds: Thresholds


SEVERITIES = ("page", "warning", "info", "none")
"""What the sources call the severities; thresholds.yml may give them other names."""


class RuleSettings(NamedTuple):
    """The content of thresholds.yml, in base units."""

    job: str
    alert_prefix: str
    selector: str
    labels: tuple[str, ...]
    severities: Mapping[str, str]
    fault_xids: str
    runbooks: str
    grafana: str
    pages: str
    run: str
    defaults: Thresholds
    overrides: tuple[Override, ...]
    budgets: tuple[Mapping[str, Any], ...]


def parse_quantity(value: object, *, share: bool = False) -> float | str:
    """Return ``10GiB`` or ``1h`` in base units; ``never`` stays. Raises ValueError for anything else."""
    if value == "never":
        return "never"
    found = _QUANTITY.fullmatch(str(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    elif found and found[2] in _UNITS:
        number = float(found[1]) * _UNITS[found[2]]
    else:
        raise ValueError(
            f"{value!r} is not a threshold; write a number, a size (10GiB), a duration (30m, 1h) or never"
        )
    if not (math.isfinite(number) and 0 <= number <= (1 if share else number)):
        raise ValueError(f"{value!r} is not {'a share from 0 to 1' if share else 'a number of 0 or more'}")
    return int(number) if number.is_integer() else number


def _same_unit(name: str, value: object, default: object) -> None:
    """Refuse a size where the default is a duration, and the like; a number alone is in base units."""

    def kind(written: object) -> str:
        found = _QUANTITY.fullmatch(str(written))
        unit = found[2] if found else ""
        return "a size" if unit in _BYTES else "a duration" if unit in _SECONDS else "a number"

    if kind(value) != kind(default) and "a number" not in (kind(value), kind(default)):
        raise ValueError(f"{name}: {value!r} is not {kind(default)}, as the default is ({default})")


@contextmanager
def naming_place(place: str) -> Iterator[None]:
    """Prefix an error with the key or the file that is being read."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _known(names: Collection[object], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            near = get_close_matches(str(name), allowed, 1)
            hint = f"do you mean {near[0]}?" if near else f"there are {', '.join(sorted(allowed))}"
            raise ValueError(f"{name}: no such key; {hint}")


def _mapping(content: object) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{content!r} has no keys; write KEY: VALUE")  # noqa: TRY004 whoever reads the file sees one kind of error
    return content


def _entries(content: Mapping[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a list by what names them in an error."""
    listed = content.get(key) or []
    if not isinstance(listed, list):
        raise ValueError(f"{key}: {listed!r} is not a list")  # noqa: TRY004
    for place, entry in enumerate(listed):
        with naming_place(f"{key}[{place}]"):
            _mapping(entry)
        name = entry.get("name")
        yield f"{key}[{place}]" + (f" ({name})" if name else ""), entry


def _pattern(value: object) -> str:
    """Return an expression that Prometheus' RE2 (no look-around) accepts. Raises ValueError if it is none."""
    text = str(value)
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression: {error}") from error
    if re.search(r"\(\?(?:<?[=!]|P=|>|\()|\\[1-9]", text):
        raise ValueError(
            f"{text!r} looks ahead, back or at itself, which Prometheus' regular expressions cannot"
        )
    return text


def read_content(text: str) -> dict[str, Any]:
    """Return what a file of thresholds says. Raises ValueError if it is not YAML, or has no keys."""
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {' '.join(str(error).split())}") from error
    return {} if content is None else _mapping(content)


def default_content() -> dict[str, Any]:
    """Return what thresholds.yml says."""
    return read_content((HOME / "thresholds.yml").read_text(encoding="utf-8"))


def add_thresholds(parser: argparse._ActionsContainer) -> None:
    """Declare the flag with a file of thresholds."""
    parser.add_argument(
        "--thresholds", metavar="FILE",
        help="what is other than the default thresholds, in the same form; - is standard input",
    )  # fmt: skip


def given_settings(file: str | None) -> RuleSettings:
    """Return the settings with what a file says. Raises StartupError or UsageError if it cannot be used."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8") if file else ""
        return read_settings(merged(read_content(text), default_content()))
    except OSError as error:
        raise StartupError(f"cannot read {file}: {error.strerror}; give a file to --thresholds") from error
    except ValueError as error:
        raise refused(file, error) from error


def refused(file: str | None, error: ValueError) -> UsageError:
    """Return what the user reads of a file that cannot be used."""
    name = "standard input" if file == "-" else file
    return UsageError(f"{name}: {error}; 'vramledger rules --defaults' has every key")


def merged(own: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default content with somebody's own in its place. Raises ValueError if it does not fit.

    Owners that are given come before the others, as the first that matches counts; a name replaces its own.
    """
    _known(own, default.keys())
    result = {**default, **own}
    for key in ("defaults", "severities", "dashboards"):
        with naming_place(key):
            given = _mapping(own.get(key) or {})
            _known(given, default[key].keys())
            for name, value in given.items():
                _same_unit(name, value, default[key][name])
            result[key] = {**default[key], **given}
    named = {entry.get("name") for _, entry in _entries(own, "owners")}
    others = [entry for entry in default["owners"] if entry["name"] not in named]
    result["owners"] = [*(own.get("owners") or []), *others]
    return result


def read_settings(content: Mapping[str, Any]) -> RuleSettings:
    """Read a whole thresholds.yml. Raises ValueError, which begins with the key, if something is unusable."""
    defaults = {}
    for name, value in content["defaults"].items():
        with naming_place(f"defaults: {name}"):
            defaults[name] = parse_quantity(value, share=name.endswith("_share"))
            if defaults[name] == "never":
                raise ValueError(
                    "never is for an owner; what nobody wants to hear is silenced in Alertmanager"
                )
    texts = ("job", "alert_prefix", "selector", "runbooks", "grafana", "pages", "run")
    for key in texts:
        if not isinstance(content.get(key, ""), str):
            raise ValueError(f"{key}: {content[key]!r} is not a text")  # noqa: TRY004
    _check_forms(content)
    labels = content.get("labels") or []
    if not isinstance(labels, list):
        raise ValueError(f"labels: {labels!r} is not a list")  # noqa: TRY004
    if unusable := [each for each in labels if not re.fullmatch(r"[a-zA-Z_]\w*", str(each))]:
        raise ValueError(f"labels: {unusable} cannot be names of labels")
    with naming_place("severities"):
        severities = content.get("severities") or {}
        _known(severities, SEVERITIES)
    with naming_place("fault_xids"):
        xids = _pattern(content.get("fault_xids", ""))
    for key, filled in (("runbooks", {"instance", "alert"}), ("pages", {"instance"})):
        if others := set(re.findall(r"\{(\w*)\}", content.get(key, ""))) - filled:
            raise ValueError(
                f"{key}: only {' and '.join(sorted(filled))} are filled in; unknown: {sorted(others)}"
            )
    written = {key: content.get(key, "") for key in texts}
    written["grafana"] = written["grafana"].rstrip("/")
    written["run"] = content.get("run", "vramledger").replace("{instance}", "{{ $labels.instance }}")
    return RuleSettings(
        **written,
        labels=tuple(labels),
        severities={name: name for name in SEVERITIES} | severities,
        fault_xids=xids,
        defaults=defaults,
        overrides=tuple(_overrides(content, defaults)),
        budgets=tuple(_budgets(content)),
    )


_FORMS = {
    "alert_prefix": (r"(?:[A-Z]\w*)?", "Acme"),
    "selector": (r'(?:[a-zA-Z_]\w*(?:=~|!~|!=|=)"(?:[^"\\{}]|\\.)*"(?:, ?(?!$)|$))*', 'namespace="gpu"'),
}
"""What these keys may look like, and an example."""


def _check_forms(content: Mapping[str, Any]) -> None:
    for key, (form, example) in _FORMS.items():
        if not re.fullmatch(form, content.get(key, "")):
            raise ValueError(f"{key}: {content[key]!r} cannot be used; write it like {example}")


def _overrides(content: Mapping[str, Any], defaults: Mapping[str, Any]) -> Iterator[Override]:
    for place, entry in _entries(content, "owners"):
        with naming_place(place):
            _known(entry, {"name", "match", *defaults})
            match = _mapping(entry.get("match") or {})
            matchable = (*ATTESTED, *DECLARED)
            if len(match) != 1 or not set(match) <= set(matchable):
                raise ValueError(f"match: give one of {', '.join(matchable)}")
            [(label, value)] = match.items()
            with naming_place(f"match: {label}"):
                pattern = _pattern(value)
            given = {}
            for name in entry.keys() - {"name", "match"}:
                _same_unit(name, entry[name], content["defaults"][name])
                with naming_place(name):
                    given[name] = parse_quantity(entry[name], share=name.endswith("_share"))
            if label in DECLARED and (excused := [each for each in given if not OWN_TROUBLE.fullmatch(each)]):
                raise ValueError(
                    f"every program chooses its own {label}, so it gives nobody another "
                    f"{', '.join(sorted(excused))}; match on one of {', '.join(ATTESTED)}"
                )
            yield Override(label, pattern, given)


def _budgets(content: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    keys = ("owner_type", "owner", "bytes")
    for place, entry in _entries(content, "budgets"):
        with naming_place(place):
            _known(entry, keys)
            if missing := [key for key in keys if key not in entry]:
                raise ValueError(f"{', '.join(missing)}: missing")
            with naming_place("bytes"):
                yield {**entry, "bytes": parse_quantity(entry["bytes"])}
