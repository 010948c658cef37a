"""Write what the demo's Prometheus gets as its past, for *Changed*: ``python -m tests.lab.past``."""

import struct
import sys
import tempfile
from itertools import islice
from pathlib import Path

from tests.lab.demo import MINUTES
from tests.support.dashboards import database
from tests.support.dashboards.nodes import SCRAPE
from tests.support.faults.recorded import recorded_scrapes
from tests.support.host.model import EPOCH
from tests.support.host.scrapes import Renderer
from tests.support.requirements import PROJECT, require_tool
from vramledger.sampling.replay import demo_recording

TARGET = PROJECT / "deploy" / "compose" / "prometheus" / "past.tsv"
NODE = "localhost:10839"
"""The ``instance`` of the demo's exporter, as prometheus.yml has it."""
SERIES = {"vramledger_owner:memory_held_bytes:sum", "vramledger_node:devices_watched:count"}
STEP = 240
"""Seconds between two values: instant queries look back 5 minutes."""
ABSENT = "-"


def lines() -> list[str]:
    """Return a line for each series: its name and labels, and its value every 4 minutes of the recording."""
    pages = recorded_scrapes(demo_recording(), Renderer(), 1.0, 0.0, SCRAPE)
    scraped = [(EPOCH + number * SCRAPE, page) for number, page in enumerate(islice(pages, MINUTES))]
    with tempfile.TemporaryDirectory() as scratch:
        samples = database.collect({NODE: scraped}, Path(scratch))
    moments = [EPOCH + step for step in range(STEP, MINUTES * 60 + 1, STEP)]
    made = []
    for labels, points in samples.points.items():
        own = dict(labels)
        name = own.pop("__name__")
        if name not in SERIES:
            continue
        known = [(at, value) for at, value in points if at <= EPOCH + MINUTES * 60]
        row = []
        for moment in moments:
            before = [value for at, value in known if moment - STEP < at <= moment]
            kept = before and before[-1] != database.STALE
            row.append(f"{struct.unpack('<d', before[-1])[0]:.0f}" if kept else ABSENT)
        text = ",".join(f'{label}="{own[label]}"' for label in sorted(own))
        made.append("\t".join([f"{name}{{{text}}}", *row]))
    return sorted(made)


def main() -> int:
    require_tool("promtool")
    TARGET.write_text("\n".join(lines()) + "\n", encoding="utf-8")
    print(f"{TARGET.relative_to(PROJECT)}: {TARGET.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
