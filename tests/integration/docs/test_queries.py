"""The example query of every metric: its names exist, and Prometheus' engine answers it."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from docs.src.generate import DOCS, queries
from tests.support import builders
from tests.support.builders import (
    MIB,
    OOMS,
    SOCKET,
    TOTAL,
    agent,
    device,
    holding,
    managed,
    process,
    snapshot,
)
from tests.support.requirements import VERSIONS, require_version
from vramledger.config import COLLECTORS
from vramledger.metrics.access import WEB_CONFIG_LOADED, WEB_CONFIG_LOADED_TIME, WEB_REFUSALS, WEB_REFUSED
from vramledger.metrics.contract import FAMILIES
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.metrics.families import Collected
from vramledger.metrics.storage import StorageFigures
from vramledger.metrics.storage import collect as collect_storage
from vramledger.model.reading import DeviceReading, HiddenHolder, Owner, PodLabels
from vramledger.model.snapshot import (
    DeviceSnapshot,
    Reservation,
    ReservationStatus,
    Snapshot,
    State,
    UndividedBytes,
)

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


def rich_host() -> Snapshot:
    """Make a host with one working device, one with every problem, and all facts about both."""
    orphan = replace(
        holding(101, 900 * MIB, State.ORPHANED, sm=0.5, last_active=builders.NOW),
        working=False, busy_without_work_since=builders.NOW, uncharged=managed(MIB, 2 * MIB),
    )  # fmt: skip
    working = device(
        0,
        [orphan, holding(102)],
        undivided=UndividedBytes(MIB, (101, 102), State.ACTIVE, False, None),
        hardware={
            **builders.HARDWARE,
            "device_performance_state": 2.0,
            "device_pcie_link_generation": {"current": 3.0, "max": 5.0},
        },
        utilization={"gpu": 0.75, "memory": 0.25},
        activity={**builders.ACTIVITY, "occupancy": 0.05, "dram": 0.9, "nvlink_receive": 0.0},
    )
    hoarded = device(
        1,
        [holding(201, TOTAL - 8192 * MIB, State.IDLE), holding(202)],
        hardware={
            **builders.HARDWARE,
            **dict.fromkeys(("device_row_remap_pending", "device_row_remap_failed"), 1.0),
            **{f"device_{coder}_utilization_ratio": 1.0 for coder in ("encoder", "decoder")},
            "device_power_limit_watts": 400.0,
            "device_remapped_rows": {"corrected": 1.0, "uncorrected": 0.0},
            "device_recovery_action": {"gpu_reset": 1.0},
            "device_pcie_link_width": {"current": 8.0, "max": 16.0},
        },
        utilization={"gpu": 0.0, "memory": 0.0},
        activity={**builders.ACTIVITY, "sm": 0.0},
        hidden=(HiddenHolder(9, 900, "cuda", "python", "ada", (1,)),),
        xids={79: 1},
    )
    processes = [process(pid, distributed=True) for pid in (101, 102, 201)] + [process(202, user="grace")]
    assert processes[0].facts is not None
    pod = Owner("pod", "ml/train-0", "ml", "train-0")
    processes[0] = replace(processes[0], facts=structs.replace(processes[0].facts, owner=pod))
    return replace(
        snapshot(working, in_trouble(hoarded), builders.coherent_device(), ASLEEP, processes=processes),
        agents={101: replace(agent(working.reading.uuid), unmapped=1)},
        agent_socket=SOCKET,
        hidden_unreadable=3,
        ooms=OOMS,
        pods=(PodLabels("ml", "train-0", (("team", "vision"),)),),
        kv_caches={101: builders.KV_CACHE._replace(pid=101)},
    )


ASLEEP = DeviceSnapshot(DeviceReading(5, "GPU-00000005", error="asleep"), up=False)


def in_trouble(hoarded: DeviceSnapshot) -> DeviceSnapshot:
    """Return a device with overlap, too many owners, an unused reservation, and an unreserved holder."""
    assert hoarded.ledger is not None
    assert hoarded.owner_usage is not None
    waiting = Reservation("pod", "ml/train-0", "kubelet", held=False)
    using = Reservation("user", "ada", "kubelet", held=True, user="ada", account="physics")
    return replace(
        hoarded,
        ghost=True,
        ledger=replace(hoarded.ledger, overlap=MIB),
        owner_usage=hoarded.owner_usage._replace(dropped=2),
        reservation_status=ReservationStatus((waiting, using), (202,), ("kubelet",)),
    )
