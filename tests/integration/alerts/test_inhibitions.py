"""One cause makes one page: a real Alertmanager gets alerts that fire together."""

import json
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.alerts.promtool import ALERTS, rules
from tests.support.faults import alertmanager
from tests.support.faults.alertmanager import request
from tests.support.fleet.engines import until
from tests.support.requirements import VERSIONS

DEVICE = {"instance": "gpu-1:10839", "gpu": "0", "uuid": "GPU-1"}
HOLDER = {**DEVICE, "pid": "7", "owner_type": "user", "owner": "ann"}
OWNER = {key: HOLDER[key] for key in HOLDER if key != "pid"}
NODE = {"instance": "gpu-1:10839"}
RANK = {**NODE, "pid": "7", "owner_type": "slurm", "owner": "17", "rank": "5", "job_id": "n0:29500"}
LOST = {"many": "GpuDriverLost", "job": "vramledger"}
RETRIES = {"many": "GpuOutOfMemory", "job": "vramledger", "user": "ann", "namespace": ""}
ARRAY = {**RETRIES, **HOLDER, "owner_type": "slurm"}
SOMETIMES = {**NODE, "answers": "sometimes"}
SEVERITIES = {f"{rule['alert']}-{rule['labels']['severity']}" for rule in rules() if "alert" in rule}

Fired = tuple[str, Mapping[str, str]]
"""Alert with its severity, labels."""


class Case(NamedTuple):
    """Alerts that fire at the same time: those that are told, and those that another one inhibits."""

    what: str
    told: list[Fired]
    inhibited: list[Fired] = []  # noqa: RUF012 it is never changed


CASES = [
    Case("a lost device and its holders", [("GpuDeviceLost-page", DEVICE)], [("GpuMemoryDead-page", HOLDER),
        ("GpuMemoryOrphaned-page", HOLDER), ("GpuMemoryOrphaned-warning", HOLDER),
        ("GpuMemoryUnattributed-warning", DEVICE), ("GpuMemoryHoarded-warning", HOLDER)]),
    Case("an exporter that is down", [("VramLedgerExporterDown-warning", NODE)],
        [("GpuMemoryDead-page", HOLDER), ("GpuMemoryLeakSuspected-warning", HOLDER),
        ("VramLedgerBlind-warning", NODE)]),
    Case("a driver that is lost", [("GpuDriverLost-page", NODE)],
        [("VramLedgerSamplingStalled-warning", NODE), ("GpuDeviceLost-page", DEVICE),
        ("GpuMemoryHoardedWhileShort-page", HOLDER)]),
    Case("sampling that stands still", [("VramLedgerSamplingStalled-warning", NODE)],
        [("GpuMemoryAboutToFill-page", HOLDER)]),
    Case("a page and the warning of the same holding", [("GpuMemoryOrphaned-page", HOLDER)],
        [("GpuMemoryOrphaned-warning", HOLDER)]),
    Case("growth that is about to fill the card", [("GpuMemoryAboutToFill-page", HOLDER)],
        [("GpuMemoryLeakSuspected-warning", HOLDER), ("GpuMemoryFilling-warning", DEVICE),
        ("GpuMemoryNearlyFull-info", DEVICE)]),
    Case("a hoarder while others are short", [("GpuMemoryHoardedWhileShort-page", HOLDER)],
        [("GpuMemoryHoarded-warning", HOLDER), ("GpuMemoryStopped-warning", HOLDER),
        ("GpuMemoryZombie-warning", HOLDER)]),
    Case("many notebooks of one person, and another's",
        [("GpuMemoryHoardedInPieces-warning", {**OWNER, "user": "ann"}),
        ("GpuNotebookIdle-warning", {**HOLDER, "pid": "8", "user": "bob"})],
        [("GpuNotebookIdle-warning", {**HOLDER, "user": "ann"})]),
    Case("a lost device beside a fault on another", [("GpuDeviceLost-page", DEVICE),
        ("GpuMemoryDead-page", {**HOLDER, "gpu": "1", "uuid": "GPU-2", "pid": "8"})]),
    Case("an exporter down beside a fault on another node", [("VramLedgerExporterDown-warning", NODE),
        ("GpuMemoryDead-page", {**HOLDER, "instance": "gpu-2:10839"})]),
    Case("a job that hangs because a rank is stopped", [("GpuJobHung-page", RANK)],
        [("GpuMemoryStopped-warning", HOLDER)]),
    Case("a job that hangs because a rank is stuck", [("GpuMemoryStuck-page", HOLDER)],
        [("GpuJobHung-page", RANK)]),
    Case("a job that hangs because its GPU is lost", [("GpuDeviceLost-page", DEVICE)],
        [("GpuJobHung-page", RANK)]),
    Case("a device that must be reset, and the error before", [("GpuResetRequired-page", DEVICE),
        ("GpuMemoryDead-page", HOLDER)], [("GpuXidError-warning", DEVICE), ("GpuResetRequired-warning",
        {**DEVICE, "action": "drain_p2p"})]),
    Case("pieces of one owner and of others", [("GpuMemoryHoardedInPieces-warning", OWNER)], [
        ("GpuMemoryHoardedInPieces-warning", {**DEVICE, "whose": "several"}),
        ("GpuHeldHardlyUsed-warning", OWNER)]),
    Case("a network that is down", [("VramLedgerManyExportersDown-page", {"job": "vramledger"})],
        [("VramLedgerExporterDown-warning",
        {"job": "vramledger", "instance": f"node-{node}"}) for node in range(40)]),
    Case("a driver that 64 nodes lose", [("GpuManyNodes-page", LOST)],
        [("GpuDriverLost-page", {**LOST, "instance": f"node-{node}"}) for node in range(64)]),
    Case("an array of 200 jobs that runs out of memory, and another user's job",
        [("GpuManyOwners-warning", RETRIES), ("GpuAllocatorRetries-warning",
        {**HOLDER, "many": "GpuAllocatorRetries", "user": "ann"}), ("GpuMemoryGrowing-warning",
        {**HOLDER, "many": "GpuMemoryGrowing", "user": "ann"})],
        [("GpuOutOfMemory-warning", {**ARRAY, "owner": str(job)}) for job in range(200)]),
    Case("an exporter that cannot see who holds", [("VramLedgerBlind-warning", NODE)],
        [("GpuMemoryUnattributed-warning", DEVICE)]),
    Case("an exporter that loses a third of its scrapes, which are enough to find what they show",
        [("VramLedgerExporterDown-warning", SOMETIMES), ("GpuMemoryDead-page", HOLDER),
        ("GpuHeldHardlyUsed-warning", DEVICE), ("VramLedgerBlind-warning", NODE)]),
    Case("an exporter that answered sometimes, and now not at all",
        [("VramLedgerExporterDown-warning", NODE)], [("VramLedgerExporterDown-warning", SOMETIMES),
        ("GpuMemoryDead-page", HOLDER)]),
    Case("a notebook that is known to be idle, and a GPU of another owner that hardly works",
        [("GpuNotebookIdle-warning", HOLDER), ("GpuMemoryPreallocatedShared-warning",
        {**HOLDER, "owner": "bob"})], [("GpuHeldHardlyUsed-warning", OWNER)]),
    Case("two clusters with one node's name",
        [("VramLedgerExporterDown-warning", {**NODE, "cluster": "east"}),
        ("GpuMemoryDead-page", {**HOLDER, "cluster": "west"})],
        [("GpuMemoryHoarded-warning", {**HOLDER, "cluster": "east"})]),
]  # fmt: skip


@pytest.fixture(scope="module", params=VERSIONS)
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run Alertmanager with the shipped configuration and empty receivers; yield its address."""
    config = yaml.safe_load((ALERTS / "alertmanager.yml").read_text(encoding="utf-8"))
    config |= {"receivers": [{"name": each["name"]} for each in config["receivers"]], "templates": []}
    folder = tmp_path_factory.mktemp("alertmanager")
    with alertmanager.running(request.param, folder, yaml.safe_dump(config)) as url:
        yield url


def send(url: str, fired: list[Fired], **more: str) -> None:
    """Send alerts, with some more labels or others; ``INSTANCE`` there is the alert's own."""
    now = datetime.now(timezone.utc).isoformat()
    body = []
    for name, labels in fired:
        alert, severity = name.split("-")
        others = {key: each.replace("INSTANCE", labels.get("instance", "")) for key, each in more.items()}
        body.append(
            {"labels": {**labels, **others, "alertname": alert, "severity": severity}, "startsAt": now}
        )
    assert request(f"{url}/api/v2/alerts", body) is not None


def uninhibited(url: str, case: str) -> list[str]:
    """Return which alerts of a case are not inhibited, once Alertmanager knows them all.

    It takes them in one by one: when the warning of the last pair is inhibited, all before it are known.
    """

    def alerts_of_case() -> list[dict[str, Any]]:
        found = json.loads(request(f"{url}/api/v2/alerts") or b"[]")
        last = [each for each in found if each["labels"]["case"] == f"after {case}"]
        known = any(each["status"]["inhibitedBy"] for each in last)
        return [each for each in found if each["labels"]["case"] == case] if known else []

    return sorted(
        f"{each['labels']['alertname']}-{each['labels']['severity']}"
        for each in until(alerts_of_case, f"Alertmanager knows {case}")
        if not each["status"]["inhibitedBy"]
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_one_cause_makes_one_page(case: Case, manager: str) -> None:
    """One cause gives one message; an alert with another cause is not inhibited."""
    fired = [*case.told, *case.inhibited]
    assert {name for name, _ in fired} <= SEVERITIES
    # The cases have different hosts, because all share one Alertmanager.
    pair: list[Fired] = [(f"GpuMemoryOrphaned-{severity}", HOLDER) for severity in ("warning", "page")]
    for whose, alerts in ((case.what, fired), (f"after {case.what}", pair)):
        send(manager, alerts, instance=f"{whose} INSTANCE", case=whose, job=whose)
    assert uninhibited(manager, case.what) == sorted(name for name, _ in case.told)


ORPHANS: list[Fired] = [
    (
        "GpuMemoryOrphaned-page",
        {**HOLDER, "instance": f"node-{at // 8}", "uuid": f"GPU-{at}", "pid": f"{at % 8}"},
    )
    for at in range(512)
]
GROUPS: dict[str, tuple[list[Fired], list[tuple[str, int]]]] = {
    "512 orphans of one job on 64 nodes": (ORPHANS, [("discard", 512), ("oncall", 512)]),
    "orphans of two owners": (
        [ORPHANS[0], (ORPHANS[1][0], {**ORPHANS[1][1], "owner": "bob"})],
        [("discard", 1), ("discard", 1), ("oncall", 1), ("oncall", 1)],
    ),
    "40 exporters that are down": (
        [("VramLedgerExporterDown-warning", {"instance": f"node-{node}"}) for node in range(40)],
        [("platform", 40)],
    ),
    "a leak that ends in an out of memory error": (
        [("GpuMemoryLeakSuspected-warning", HOLDER), ("GpuAllocatorRetries-warning", HOLDER),
         ("GpuOutOfMemory-warning", {**HOLDER, "pid": "8"})], [("platform", 3)],
    ),
    "eight ranks that are idle": (
        [("GpuMemoryHoarded-warning", {**HOLDER, "pid": f"{rank}"}) for rank in range(8)], [("platform", 8)],
    ),
    "two stopped ranks of one job, each in its pod": (
        [("GpuJobHung-page", {**RANK, "owner_type": "pod", "owner": f"x/{pod}", "namespace": "x", "pid": pod})
         for pod in ("1", "2")], [("discard", 2), ("oncall", 2)],
    ),
    "two GPUs lost on two nodes": (
        [("GpuDeviceLost-page", {**DEVICE, "instance": f"node-{node}"}) for node in range(2)],
        [("oncall", 1), ("oncall", 1)],
    ),
}  # fmt: skip
"""What fires at one time, and which messages it makes: to whom, about how many alerts."""


@pytest.mark.parametrize("case", GROUPS)
def test_one_cause_makes_one_message(case: str, manager: str) -> None:
    """However many alerts one cause raises, each receiver gets one message."""
    fired, expected = GROUPS[case]
    send(manager, fired, cluster=case)

    def messages() -> list[tuple[str, int]] | None:
        groups = json.loads(request(f"{manager}/api/v2/alerts/groups?inhibited=true") or b"[]")
        found = sorted(
            (each["receiver"]["name"], len(each["alerts"]))
            for each in groups
            if each["labels"].get("cluster") == case
        )
        return found if sum(count for _, count in found) == sum(count for _, count in expected) else None

    assert until(messages, f"Alertmanager has grouped {case}") == expected
