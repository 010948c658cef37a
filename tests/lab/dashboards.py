"""Send every query of every dashboard to a real Prometheus, and write the answers to .cache/dashboards.

``python -m tests.lab.dashboards``, or ``make dashboards``.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support.dashboards import database
from tests.support.dashboards.answers import EMPTY, Answer, answers
from tests.support.dashboards.files import Json, load_dashboards, panels
from tests.support.dashboards.nodes import HOURS, NODES, RECORDED, scrapes
from tests.support.requirements import PROJECT, require_tool

TARGET = PROJECT / ".cache" / "dashboards" / "panels.md"

HEAD = """# What each panel showed

Written by `make dashboards`: every query of every panel, asked of a real {version} the way Grafana asks,
with All chosen in every variable; queries about one device for the device of which most is known. It holds
{hours:.0f} hours of {nodes} simulated nodes, most of them with a fault, of {recorded} recordings of real
H200s, and of what the shipped rules made of them. *Series* is how many came back, *largest* the highest
value among them, of a graph within the time range, and whose it is. The exporter's own memory and CPU time
are those of the process that simulates.
"""


def text(found: Iterable[Answer], version: str) -> str:
    """Return the table of answers."""
    dashboards = load_dashboards()
    lines = [HEAD.format(version=version, hours=HOURS, nodes=len(NODES), recorded=len(RECORDED))]
    by: dict[str, list[Answer]] = {}
    for answer in found:
        by.setdefault(answer.asked.dashboard, []).append(answer)
    for uid, all_ in by.items():
        units = {panel["title"]: _units(panel) for panel in panels(dashboards[uid])}
        mapped = {panel["title"]: _words(panel) for panel in panels(dashboards[uid])}
        lines += [
            f"## {dashboards[uid]['title']}",
            "",
            "| panel | query | series | largest |",
            "|---|---|---|---|",
        ]
        for answer in all_:
            asked = answer.asked
            own = units.get(asked.panel, {})
            unit = own.get(f"Value #{asked.ref}") or own.get("", "")
            example = _example(answer, unit, mapped.get(asked.panel, {}))
            if answer.value is None:
                example = EMPTY.get((asked.dashboard, asked.panel, asked.ref), "")
            lines.append(f"| {asked.panel} | {asked.ref} | {answer.series} | {example} |")
        lines.append("")
    return "\n".join(lines)


def _units(panel: Json) -> dict[str, str]:
    overrides = {
        each["matcher"]["options"]: one["value"]
        for each in panel["fieldConfig"]["overrides"]
        for one in each["properties"]
        if one["id"] == "unit"
    }
    return {"": panel["fieldConfig"]["defaults"]["unit"], **overrides}


def _words(panel: Json) -> dict[str, str]:
    """Return a panel's text in place of figures."""
    mappings = panel["fieldConfig"]["defaults"].get("mappings", ())
    return {value: look["text"] for mapping in mappings for value, look in mapping["options"].items()}


def _example(answer: Answer, unit: str, mapped: Mapping[str, str]) -> str:
    value = answer.value or 0.0
    shown = mapped.get(f"{value:.0f}", f"{value:,.4g}")
    if unit == "bytes":
        shown = f"{value / 2**30:,.2f} GiB" if value >= 2**30 else f"{value / 2**20:,.1f} MiB"
    elif unit == "percentunit":
        shown = f"{value:.1%}"
    elif unit == "dateTimeFromNow":
        shown = f"{value / 1000:,.0f} s of the simulation"
    elif unit not in ("none", "short", ""):
        shown += f" {unit.removeprefix('suffix: ')}"
    labels = [f"{key} {text}" for key, text in answer.labels.items() if key not in ("job", "uuid")]
    return shown + (f" ({', '.join(labels)})" if labels else "")


def main() -> None:
    program = require_tool("prometheus")
    require_tool("promtool")
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    version = " ".join((said.stdout + said.stderr).split()[:3]).replace(", version", "").capitalize()
    with tempfile.TemporaryDirectory(prefix="dashboards-") as scratch:
        samples = database.collect(scrapes(), Path(scratch))
        with database.prometheus(program, Path(scratch) / "prometheus", samples) as engine:
            found = list(answers(engine))
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(text(found, version), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(PROJECT)}")
    empty = [each.asked for each in found if not each.series]
    print(f"{len(found)} queries, {len(empty)} without an answer: {[(e.panel, e.ref) for e in empty]}")


if __name__ == "__main__":
    main()
