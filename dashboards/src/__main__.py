"""Write dashboards/*.json: ``python -m dashboards.src [--check]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dashboards.src import device, exporter, fleet, framework, node, owner, process
from dashboards.src.dashboard import PREFIX, Dashboard

HOME = Path(__file__).parents[1]


def dashboards() -> list[Dashboard]:
    """Return every dashboard."""
    return [module.dashboard() for module in (fleet, node, device, owner, process, framework, exporter)]


def rendered_files() -> dict[Path, str]:
    """Return the content of each file."""
    return {
        HOME / f"{each.uid.removeprefix(PREFIX)}.json": json.dumps(
            each.json(), indent=1, sort_keys=True, ensure_ascii=False
        )
        + "\n"
        for each in dashboards()
    }


def main() -> int:
    """Write the files, or with ``--check`` say which differ; the exit status is 1 when some do."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.src", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what has drifted")
    if not parser.parse_args().check:
        for path, text in rendered_files().items():
            path.write_text(text, encoding="utf-8")
        return 0
    drifted = [
        path
        for path, text in rendered_files().items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    for path in drifted:
        sys.stderr.write(f"{path.name} is not what dashboards/src makes: run make dashboards\n")
    return 1 if drifted else 0


if __name__ == "__main__":
    sys.exit(main())
