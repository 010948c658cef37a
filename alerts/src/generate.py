"""Write *.rules.yml, rules.json and chart.json in alerts/ from the sources in this folder and thresholds.yml.

``vramledger rules`` renders the same for other thresholds.

    python alerts/src/generate.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vramledger.commands.alert_rules import read_sources, render_rule, rendered_files, written
from vramledger.commands.alert_settings import RuleSettings, read_content, read_settings

ALERTS = Path(__file__).parents[1]

ALL_RULES = "rules.json"
"""All groups in one file, for deploy/mixin: older versions of jsonnet cannot read our YAML."""

FOR_CHART = "chart.json"
"""All rules with the names of thresholds in them, which the chart fills in with those that it is given."""

HEADER = "# Written by `make alerts` from src/{source}.yml and thresholds.yml: change those, not this file.\n"


class _Names(dict[str, object]):
    """Each name has itself as its value."""

    def __missing__(self, name: str) -> object:
        return f"<<{name}>>"

    def __contains__(self, _: object) -> bool:
        return True


def for_chart(settings: RuleSettings) -> dict[str, object]:
    """Return the rules by file, before thresholds and owners are filled in."""
    unnamed, names = settings._replace(labels=()), _Names(chart=None)
    return {
        path.stem: {
            "groups": [
                {**group, "rules": [render_rule(rule, unnamed, names) for rule in group["rules"]]}
                for group in content["groups"]
            ]
        }
        for path, content in read_sources(settings, ALERTS).items()
    }


def contents() -> dict[str, str]:
    """Return every rule file and its content.

    Raises:
        ValueError: a file cannot be used; the message begins with its name below alerts/.
    """
    try:
        settings = read_settings(read_content((ALERTS / "thresholds.yml").read_text(encoding="utf-8")))
    except ValueError as error:
        message = f"thresholds.yml: {error}"
        raise ValueError(message) from error
    files = rendered_files(settings, ALERTS)
    groups = [group for content in files.values() for group in content["groups"]]
    return {
        **{f"{name}.rules.yml": HEADER.format(source=name) + written(each) for name, each in files.items()},
        FOR_CHART: json.dumps(for_chart(settings), indent=1, ensure_ascii=False) + "\n",
        ALL_RULES: json.dumps({"groups": groups}, indent=1, ensure_ascii=False) + "\n",
    }


def main() -> int:
    """Write the files, or with ``--check`` say which are not up to date (exit code 1)."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument(
        "--check", action="store_true", help="write nothing; fail when a file is out of date"
    )
    check = arguments.parse_args().check
    try:
        files = {ALERTS / name: text for name, text in contents().items()}
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
