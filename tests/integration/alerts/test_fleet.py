"""What is true of many exporters at one time is said once, about all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.alerts.promtool import firing


def targets(values: dict[str, int]) -> list[dict[str, str]]:
    """Return the `up` of exporters: how many there are with which values, as promtool notes them."""
    counts = enumerate((each for each, count in values.items() for _ in range(count)), 1)
    return [
        {"series": f'up{{job="vramledger",instance="node-{number}"}}', "values": each}
        for number, each in counts
    ]


def names(folder: Path, series: list[dict[str, str]], minute: float) -> list[str]:
    """Return the alerts that fire, each as often as it does."""
    return sorted(each.name for each in firing(folder, series, minute))


@pytest.mark.parametrize(("down", "page"), [(2, 0), (3, 1), (10, 1)])
def test_more_than_a_fifth_of_the_exporters_is_one_page(down: int, page: int, tmp_path: Path) -> None:
    """Two of ten that are down do not page, three of them do."""
    series = targets({"1x99": 10 - down, "1x4 0x99": down})

    assert names(tmp_path, series, 12) == [
        *["VramLedgerExporterDown"] * down, *["VramLedgerManyExportersDown"] * page
    ]  # fmt: skip


def test_one_exporter_is_not_many(tmp_path: Path) -> None:
    """Where there are two nodes and one of them is down, it is one node's matter."""
    assert names(tmp_path, targets({"1x99": 1, "1x4 0x99": 1}), 12) == ["VramLedgerExporterDown"]


def test_the_clusters_count_apart(tmp_path: Path) -> None:
    """All exporters of a small cluster that are down are a page, although the large one hides them."""
    small = [
        {**each, "series": each["series"].replace("{", '{cluster="small",')} for each in targets({"0x99": 3})
    ]
    found = firing(tmp_path, [*targets({"1x99": 50}), *small], 12)

    assert [each.labels["cluster"] for each in found if each.name == "VramLedgerManyExportersDown"] == [
        "small"
    ]


@pytest.mark.parametrize(
    ("values", "fires"),
    [
        ("1x400", False),  # each 15 seconds
        ("1 _x3 " * 100, False),  # each minute
        ("1 _x7 " * 50, True),  # each 2 minutes
        ("1x40 _x40 1x300", False),  # Prometheus was away for 10 minutes
    ],
    ids=["15 s", "1 min", "2 min", "a pause"],
)
def test_rare_scrapes_are_said_once(values: str, fires: bool, tmp_path: Path) -> None:
    """A scrape interval with which rules would miss what happens is named, for all exporters together."""
    found = [each for each in names(tmp_path, targets({values: 5}), 45) if each != "VramLedgerExporterDown"]

    assert found == ["VramLedgerScrapesTooRare"] * fires
