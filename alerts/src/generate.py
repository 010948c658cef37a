"""Write *.rules.yml and rules.json in alerts/ from the sources in this folder and thresholds.yml.

``vramledger rules`` renders the same for other thresholds.

    python alerts/src/generate.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vramledger.commands.alert_settings import read_content, read_settings
from vramledger.commands.rules import rendered_files, written

ALERTS = Path(__file__).parents[1]

ALL_RULES = "rules.json"
"""All groups in one file, for deploy/mixin: older versions of jsonnet cannot read our YAML."""

HEADER = "# Written by `make alerts` from src/{source}.yml and thresholds.yml: change those, not this file.\n"


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
