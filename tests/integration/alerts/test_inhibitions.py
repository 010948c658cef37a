"""One cause makes one page: a real Alertmanager gets alerts that fire together."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any

import pytest
import yaml

from tests.support.alerts.promtool import ALERTS, rules
from tests.support.faults import alertmanager
from tests.support.fleet.engines import until
from tests.support.ports import free_port
from tests.support.requirements import VERSIONS

DEVICE = {"instance": "gpu-1:10839", "gpu": "0", "uuid": "GPU-1"}
HOLDER = {**DEVICE, "pid": "7", "owner_type": "user", "owner": "ann"}
NODE = {"instance": "gpu-1:10839"}
SEVERITIES = {(rule["alert"], rule["labels"]["severity"]) for rule in rules() if "alert" in rule}

Fired = tuple[str, str, Mapping[str, str]]
"""Alert, severity, labels."""

CASES: dict[str, tuple[list[Fired], set[str]]] = {
    "a lost device and its holders": (
        [
            ("GpuDeviceLost", "page", DEVICE), ("GpuMemoryDead", "page", HOLDER),
            ("GpuMemoryOrphaned", "page", HOLDER), ("GpuMemoryOrphaned", "warning", HOLDER),
            ("GpuMemoryUnattributed", "warning", DEVICE), ("GpuMemoryHoarded", "warning", HOLDER),
        ],
        {"GpuDeviceLost/page"},
    ),
    "an exporter that is down": (
        [
            ("VramLedgerExporterDown", "warning", NODE), ("GpuMemoryDead", "page", HOLDER),
            ("GpuMemoryLeakSuspected", "warning", HOLDER), ("VramLedgerBlind", "warning", NODE),
        ],
        {"VramLedgerExporterDown/warning"},
    ),
    "a driver that is lost": (
        [
            ("GpuDriverLost", "page", NODE), ("VramLedgerSamplingStalled", "warning", NODE),
            ("GpuDeviceLost", "page", DEVICE), ("GpuMemoryHoardedWhileShort", "page", HOLDER),
        ],
        {"GpuDriverLost/page"},
    ),
    "sampling that stands still": (
        [("VramLedgerSamplingStalled", "warning", NODE), ("GpuMemoryAboutToFill", "page", HOLDER)],
        {"VramLedgerSamplingStalled/warning"},
    ),
    "a page and the warning of the same holding": (
        [("GpuMemoryOrphaned", "page", HOLDER), ("GpuMemoryOrphaned", "warning", HOLDER)],
        {"GpuMemoryOrphaned/page"},
    ),
    "growth that is about to fill the card": (
        [
            ("GpuMemoryAboutToFill", "page", HOLDER), ("GpuMemoryLeakSuspected", "warning", HOLDER),
            ("GpuMemoryFilling", "warning", DEVICE), ("GpuMemoryNearlyFull", "info", DEVICE),
        ],
        {"GpuMemoryAboutToFill/page"},
    ),
    "a hoarder while others are short": (
        [("GpuMemoryHoardedWhileShort", "page", HOLDER), ("GpuMemoryHoarded", "warning", HOLDER)],
        {"GpuMemoryHoardedWhileShort/page"},
    ),
    "a lost device beside a fault on another": (
        [
            ("GpuDeviceLost", "page", DEVICE),
            ("GpuMemoryDead", "page", {**HOLDER, "gpu": "1", "uuid": "GPU-2", "pid": "8"}),
        ],
        {"GpuDeviceLost/page", "GpuMemoryDead/page"},
    ),
    "an exporter down beside a fault on another node": (
        [
            ("VramLedgerExporterDown", "warning", NODE),
            ("GpuMemoryDead", "page", {**HOLDER, "instance": "gpu-2:10839"}),
        ],
        {"VramLedgerExporterDown/warning", "GpuMemoryDead/page"},
    ),
}  # fmt: skip
"""Alerts that fire at the same time, and those of them that are not inhibited."""


RANK = {**NODE, "pid": "7", "owner_type": "slurm", "owner": "17", "rank": "5", "job_id": "n0:29500"}
CASES["a job that hangs because a rank is stopped"] = (
    [("GpuJobHung", "page", RANK), ("GpuMemoryStopped", "warning", HOLDER)], {"GpuJobHung/page"},
)  # fmt: skip
CASES["a job that hangs because a rank is stuck"] = (
    [("GpuJobHung", "page", RANK), ("GpuMemoryStuck", "page", HOLDER)], {"GpuMemoryStuck/page"},
)  # fmt: skip
CASES["a job that hangs because its GPU is lost"] = (
    [("GpuJobHung", "page", RANK), ("GpuDeviceLost", "page", DEVICE)], {"GpuDeviceLost/page"},
)  # fmt: skip
CASES["a device that must be reset, and the error before"] = (
    [
        ("GpuResetRequired", "page", DEVICE), ("GpuXidError", "warning", DEVICE),
        ("GpuResetRequired", "warning", {**DEVICE, "action": "drain_p2p"}),
        ("GpuMemoryDead", "page", HOLDER),
    ],
    {"GpuResetRequired/page", "GpuMemoryDead/page"},
)  # fmt: skip
CASES["pieces of one owner and of others"] = (
    [
        ("GpuMemoryHoardedInPieces", "warning", {**DEVICE, "owner_type": "user", "owner": "ann"}),
        ("GpuMemoryHoardedInPieces", "warning", {**DEVICE, "whose": "several"}),
        ("GpuHeldHardlyUsed", "warning", {**DEVICE, "owner_type": "user", "owner": "ann"}),
    ],
    {"GpuMemoryHoardedInPieces/warning"},
)
CASES["a network that is down"] = (
    [
        ("VramLedgerManyExportersDown", "page", {"job": "vramledger"}),
        *(
            ("VramLedgerExporterDown", "warning", {"job": "vramledger", "instance": f"node-{node}"})
            for node in range(40)
        ),
    ],
    {"VramLedgerManyExportersDown/page"},
)
LOST = {"many": "GpuDriverLost", "job": "vramledger"}
CASES["a driver that 64 nodes lose"] = (
    [
        ("GpuManyNodes", "page", LOST),
        *(("GpuDriverLost", "page", {**LOST, "instance": f"node-{node}"}) for node in range(64)),
    ],
    {"GpuManyNodes/page"},
)
RETRIES = {"many": "GpuOutOfMemory", "job": "vramledger", "user": "ann", "namespace": ""}
CASES["an array of 200 jobs that runs out of memory, and another user's job"] = (
    [
        ("GpuManyOwners", "warning", RETRIES),
        *(
            ("GpuOutOfMemory", "warning", {**RETRIES, **HOLDER, "owner_type": "slurm", "owner": str(job)})
            for job in range(200)
        ),
        ("GpuAllocatorRetries", "warning", {**HOLDER, "many": "GpuAllocatorRetries", "user": "ann"}),
        ("GpuMemoryGrowing", "warning", {**HOLDER, "many": "GpuMemoryGrowing", "user": "ann"}),
    ],
    {"GpuManyOwners/warning", "GpuAllocatorRetries/warning", "GpuMemoryGrowing/warning"},
)
CASES["an exporter that cannot see who holds"] = (
    [("VramLedgerBlind", "warning", NODE), ("GpuMemoryUnattributed", "warning", DEVICE)],
    {"VramLedgerBlind/warning"},
)
SOMETIMES = {**NODE, "answers": "sometimes"}
CASES["an exporter that loses a third of its scrapes, which are enough to find what they show"] = (
    [
        ("VramLedgerExporterDown", "warning", SOMETIMES), ("GpuMemoryDead", "page", HOLDER),
        ("GpuHeldHardlyUsed", "warning", DEVICE), ("VramLedgerBlind", "warning", NODE),
    ],
    {
        "VramLedgerExporterDown/warning", "GpuMemoryDead/page",
        "GpuHeldHardlyUsed/warning", "VramLedgerBlind/warning",
    },
)  # fmt: skip
CASES["an exporter that answered sometimes, and now not at all"] = (
    [
        ("VramLedgerExporterDown", "warning", NODE), ("VramLedgerExporterDown", "warning", SOMETIMES),
        ("GpuMemoryDead", "page", HOLDER),
    ],
    {"VramLedgerExporterDown/warning"},
)  # fmt: skip
CASES["a notebook that is known to be idle, and a GPU of another owner that hardly works"] = (
    [
        ("GpuNotebookIdle", "warning", HOLDER),
        ("GpuHeldHardlyUsed", "warning", {key: HOLDER[key] for key in HOLDER if key != "pid"}),
        ("GpuMemoryPreallocatedShared", "warning", {**HOLDER, "owner": "bob"}),
    ],
    {"GpuNotebookIdle/warning", "GpuMemoryPreallocatedShared/warning"},
)
CASES["two clusters with one node's name"] = (
    [
        ("VramLedgerExporterDown", "warning", {**NODE, "cluster": "east"}),
        ("GpuMemoryDead", "page", {**HOLDER, "cluster": "west"}),
        ("GpuMemoryHoarded", "warning", {**HOLDER, "cluster": "east"}),
    ],
    {"VramLedgerExporterDown/warning", "GpuMemoryDead/page"},
)


@pytest.fixture(scope="module", params=VERSIONS)
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run Alertmanager with the shipped configuration and empty receivers; yield its address."""
    home = tmp_path_factory.mktemp("alertmanager")
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text(encoding="utf-8"))
    config["receivers"] = [{"name": each["name"]} for each in config["receivers"]]
    config["templates"] = []
    (home / "alertmanager.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    port = free_port()
    command = [
        *alertmanager.command(request.param),
        f"--config.file={home}/alertmanager.yml", f"--storage.path={home}/data",
        "--cluster.listen-address=", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            until(lambda: _request(f"{url}/-/ready") is not None, "Alertmanager is ready")
            yield url
        finally:
            process.terminate()


def _request(url: str, body: object = None) -> bytes | None:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 loopback
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 loopback
            content: bytes = answer.read()
            return content
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except OSError:
        return None


def uninhibited_alerts(url: str, case: str) -> set[str]:
    """Return which alerts of a case are not inhibited, once Alertmanager knows them all.

    It takes them in one by one: when the warning of the last pair is inhibited, all before it are known.
    """

    def alerts_of_case() -> list[dict[str, Any]]:
        found = json.loads(_request(f"{url}/api/v2/alerts") or b"[]")
        last = [each for each in found if each["labels"]["case"] == f"after {case}"]
        known = any(each["status"]["inhibitedBy"] for each in last)
        return [each for each in found if each["labels"]["case"] == case] if known else []

    return {
        f"{each['labels']['alertname']}/{each['labels']['severity']}"
        for each in until(alerts_of_case, f"Alertmanager knows {case}")
        if not each["status"]["inhibitedBy"]
    }


@pytest.mark.parametrize("case", CASES)
def test_one_cause_makes_one_page(case: str, manager: str) -> None:
    """One cause gives one message; an alert with another cause is not inhibited."""
    fired, expected = CASES[case]
    assert {(name, severity) for name, severity, _ in fired} <= SEVERITIES
    # The cases have different hosts, because all share one Alertmanager.
    pair = [("GpuMemoryOrphaned", severity, HOLDER) for severity in ("warning", "page")]
    for whose, alerts in ((case, fired), (f"after {case}", pair)):
        body = [
            {
                "labels": {
                    **labels, "instance": f"{whose} {labels.get('instance', '')}", "alertname": name,
                    "severity": severity, "case": whose, "job": whose,
                },
                "startsAt": datetime.now(timezone.utc).isoformat(),
            }
            for name, severity, labels in alerts
        ]  # fmt: skip
        assert _request(f"{manager}/api/v2/alerts", body) is not None
    assert uninhibited_alerts(manager, case) == expected


ORPHANS: list[Fired] = [
    (
        "GpuMemoryOrphaned",
        "page",
        {**HOLDER, "instance": f"node-{node}", "uuid": f"GPU-{node}-{gpu}", "pid": f"{gpu}"},
    )
    for node in range(64)
    for gpu in range(8)
]
GROUPS: dict[str, tuple[list[Fired], list[tuple[str, int]]]] = {
    "512 orphans of one job on 64 nodes": (ORPHANS, [("discard", 512), ("oncall", 512)]),
    "orphans of two owners": (
        [ORPHANS[0], (*ORPHANS[1][:2], {**ORPHANS[1][2], "owner": "bob"})],
        [("discard", 1), ("discard", 1), ("oncall", 1), ("oncall", 1)],
    ),
    "40 exporters that are down": (
        [("VramLedgerExporterDown", "warning", {"instance": f"node-{node}"}) for node in range(40)],
        [("platform", 40)],
    ),
    "a leak that ends in an out of memory error": (
        [
            ("GpuMemoryLeakSuspected", "warning", HOLDER), ("GpuAllocatorRetries", "warning", HOLDER),
            ("GpuOutOfMemory", "warning", {**HOLDER, "pid": "8"}),
        ],
        [("platform", 3)],
    ),
    "eight ranks that are idle": (
        [("GpuMemoryHoarded", "warning", {**HOLDER, "pid": f"{rank}"}) for rank in range(8)],
        [("platform", 8)],
    ),
    "two stopped ranks of one job, each in its pod": (
        [
            (
                "GpuJobHung", "page",
                {**RANK, "owner_type": "pod", "owner": f"x/{pod}", "namespace": "x", "pid": pod},
            )
            for pod in ("1", "2")
        ],
        [("discard", 2), ("oncall", 2)],
    ),
    "two GPUs lost on two nodes": (
        [("GpuDeviceLost", "page", {**DEVICE, "instance": f"node-{node}"}) for node in range(2)],
        [("oncall", 1), ("oncall", 1)],
    ),
}  # fmt: skip
"""What fires at one time, and which messages it makes: to whom, about how many alerts."""


@pytest.mark.parametrize("case", GROUPS)
def test_one_cause_makes_one_message(case: str, manager: str) -> None:
    """However many alerts one cause raises, each receiver gets one message."""
    fired, expected = GROUPS[case]
    body = [
        {
            "labels": {**labels, "alertname": name, "severity": severity, "cluster": case},
            "startsAt": datetime.now(timezone.utc).isoformat(),
        }
        for name, severity, labels in fired
    ]
    assert _request(f"{manager}/api/v2/alerts", body) is not None

    def messages() -> list[tuple[str, int]] | None:
        groups = json.loads(_request(f"{manager}/api/v2/alerts/groups?inhibited=true") or b"[]")
        found = sorted(
            (each["receiver"]["name"], len(each["alerts"]))
            for each in groups
            if each["labels"].get("cluster") == case
        )
        return found if sum(count for _, count in found) == sum(count for _, count in expected) else None

    assert until(messages, f"Alertmanager has grouped {case}") == expected
