"""The example query of every metric: its names exist, and Prometheus' engine answers it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from docs.src.generate import DOCS, queries
from tests.support import builders
from tests.support.builders import rich_host, snapshot
from tests.support.requirements import VERSIONS, require_version
from vramledger.config import COLLECTORS
from vramledger.metrics.access import WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME, WEB_REFUSALS, WEB_REFUSED
from vramledger.metrics.contract import FAMILIES
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Collected
from vramledger.metrics.storage import StorageFigures
from vramledger.metrics.storage import collect as collect_storage
from vramledger.model.snapshot import Snapshot

INDEX = re.findall(
    r"^ *```promql\n(.*?)^ *```$", (DOCS / "METRICS.md").read_text("utf-8"), re.MULTILINE | re.DOTALL
)
QUERIES = {**queries(), **{f"index-{number}": query for number, query in enumerate(INDEX)}}
HOURS = 3


def test_a_query_uses_what_exists() -> None:
    """Each label by which a query groups or joins is one of a family; Prometheus finds other mistakes."""
    known = {"job", "instance", "label_team"}.union(*(family.labels for family in FAMILIES.values()))
    for name, query in QUERIES.items():
        for listed in re.findall(r"\b(?:by|on|without|ignoring|group_left|group_right) \(([^)]*)\)", query):
            assert set(re.findall(r"\w+", listed)) <= known, name


@pytest.mark.parametrize("version", VERSIONS)
def test_prometheus_answers_every_query(version: str, tmp_path: Path) -> None:
    """Over a full host, a host with only zeros and a released host, each query gives a series."""
    expressions = {name: " ".join(query.split()) for name, query in QUERIES.items()}
    asked = [{"expr": each, "eval_time": f"{HOURS}h", "exp_samples": []} for each in expressions.values()]
    series = [{"series": name, "values": values} for name, values in simulated_series()]
    case = tmp_path / "queries.test.yml"
    test = {"interval": "30s", "input_series": series, "promql_expr_test": asked}
    case.write_text(json.dumps({"tests": [test]}), encoding="utf-8")  # JSON is YAML, and fast

    command: list[str | Path] = [require_version("promtool", version), "test", "rules", case]
    done = subprocess.run(command, check=False, capture_output=True, text=True)

    # It complains about each answer, because none is expected, and quotes the query as JSON does.
    said = done.stdout + done.stderr
    assert [line for line in said.splitlines() if "err: " in line] == []
    answered = {json.loads(each) for each in re.findall(r'^ +expr: (".*"), time: ', said, re.MULTILINE)}
    assert {name: query for name, query in expressions.items() if query not in answered} == {}, said[-2000:]


def simulated_series() -> Iterator[tuple[str, str]]:
    """Yield the series of three hosts, each with its values over some hours in promtool's notation."""
    steps = HOURS * 120
    for line in scraped_lines(rich_host()):
        name, _, value = line.rpartition(" ")
        growth = 1 if name.partition("{")[0].endswith("_total") else 0
        yield with_instance(name, "rich"), f"{float(value):f}+{growth}x{steps}"
        yield with_instance(name, "zero"), f"0x{steps}"
    for line in scraped_lines(replace(snapshot(), up=False, released_until=builders.NOW)):
        name, _, value = line.rpartition(" ")
        yield with_instance(name, "released"), f"{float(value):f}x{steps}"


def with_instance(series: str, instance: str) -> str:
    """Return a series with the label that tells hosts apart."""
    name, _, labels = series.partition("{")
    return f'{name}{{instance="{instance}"{"," if labels else ""}{labels or "}"}'


def scraped_lines(shot: Snapshot) -> list[str]:
    """Return the samples of a scrape that shows only the largest holding of each device."""
    exposition = Exposition(1, os.getpid, collect_own=own_families)
    page = exposition.render(shot, ScrapeRequest(frozenset(COLLECTORS))).decode()
    return [line for line in page.splitlines() if not line.startswith("#")]


def own_families() -> Collected:
    """Say that a web configuration file is in use, and that the storage has had an error."""
    storage = StorageFigures(
        up=True, size=2**29, size_limit=2**29, age_limit=604800.0, oldest=builders.NOW - 600,
        newest=builders.NOW, written=2**21, dropped=0, restarts=0,
        last_error=(builders.NOW, "No space left on device"),
    )  # fmt: skip
    return [
        *collect_storage(storage),
        (WEB_REFUSED, [((reason,), 0.0) for reason in WEB_REFUSALS]),
        (WEB_CONFIG_LOADED, [((), 1.0)]),
        (WEB_CONFIG_LOADED_TIME, [((), builders.NOW)]),
    ]
