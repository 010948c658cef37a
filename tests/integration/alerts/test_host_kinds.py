"""What the alerts say on each kind of host on which nothing is broken; the table of kinds says the same."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import judging
from tests.support.alerts.promtool import SELDOM, alert_names, firing
from tests.support.host.model import GIB
from tests.support.host.scrapes import Renderer
from vramledger.model.snapshot import Snapshot

MINUTES = 90
"""Longer than the longest wait of an alert about holders: an hour of idleness, and its `for`."""

LARGE = 40 * GIB
"""What every holder counts as having, so that no threshold hides what the rules think of it."""

BLIND = "no-host-pid-namespace"
ENTRIES = {entry.name: entry for entry in judging.load()}
_PLACE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?")


def last(name: str) -> Snapshot:
    """Return the last snapshot of a recording; or of one whose exporter sees no process of the host."""
    if name == BLIND:
        shot = last("machine-cdmm")
        devices = tuple(replace(each, holdings=()) for each in shot.devices)
        return replace(shot, devices=devices, host_pid_namespace=False, processes={}, rows={})
    return judging.replay(judging.HOME, ENTRIES[name])[-1]


def steady(name: str, shot: Snapshot) -> Iterator[dict[str, str]]:
    """Yield the series of a host that stays for hours as a snapshot has it."""
    assert shot.time is not None
    steps = MINUTES * 4
    for line in [*Renderer().lines(shot)]:
        series, _, text = line.rpartition(" ")
        place = _PLACE.fullmatch(series)
        assert place is not None, line
        family, value, growth = place["name"], float(text), 0
        if family == "vramledger_sample_timestamp_seconds":
            value, growth = 0.0, 15
        elif "_timestamp_seconds" in family or family.endswith("start_time_seconds"):
            value -= shot.time
        elif family == "vramledger_process_memory_bytes":
            value = LARGE
        labels = f'job="vramledger",instance="{name}"' + (f",{place['labels']}" if place["labels"] else "")
        yield {"series": f"{family}{{{labels}}}", "values": f"{value:f}+{growth}x{steps}"}


def by_host(folder: Path, names: Iterable[str]) -> Mapping[str, set[tuple[str, str]]]:
    """Return the alerts of each host after hours: name and pid, which is empty where it names no process."""
    series = [each for name in names for each in steady(name, last(name))]
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in names}
    for name, labels, _ in firing(folder, series, MINUTES - 6, step=SELDOM):
        found[labels["instance"]].add((name, labels.get("pid", "")))
    return found


HOSTS: Mapping[str, set[tuple[str, str]]] = {
    # The holders of these do nothing, which the GPU's counters prove.
    "machine-cdmm": {("GpuMemoryHoarded", "2002")},
    "machine-coherent": {("GpuMemoryHoarded", "2002")},
    # The memory of an instance is counted once, under the first; so 3002 has no device to be compared with.
    "machine-mig-compute-instances": {("GpuMemoryHoarded", "3001")},
    # On the instances of 3003 and 3004 no counter has moved, and 3002 works.
    "machine-mig": {("GpuMemoryHoarded", "3001")},
    "machine-mig-without-gpm": set(),
    "machine-unified": set(),
    "machine-vgpu": set(),
    "machine-wsl2": {("VramLedgerBlind", "")},
    "machine-hidepid": {
        ("GpuMemoryHoarded", "2001"),
        ("VramLedgerBlind", ""),
        ("VramLedgerCollectorFailing", ""),
    },
    BLIND: {("VramLedgerBlind", "")},
    "mps-clients": set(),
    "notebook-kernel": set(),
}


def test_the_alerts_on_each_kind_of_host(tmp_path: Path) -> None:
    """Where idleness cannot be proven nobody is called idle, and what cannot be seen is said once."""
    assert by_host(tmp_path, HOSTS) == HOSTS


@pytest.mark.parametrize("name", HOSTS)
def test_the_table_of_kinds_says_what_the_rules_do(name: str, project: Path) -> None:
    """Each recording has a row in the table, which names every alert that fires on it."""
    lines = (project / "alerts/README.md").read_text("utf-8").splitlines()
    (row,) = [line for line in lines if line.startswith("| ") and f"`{name}`" in line]
    *_, seen, _ = row.split("|")
    assert set(re.findall(r"\b(?:Gpu|VramLedger)\w+", seen)) == {alert for alert, _ in HOSTS[name]}


def test_the_table_of_kinds_names_alerts_that_exist(project: Path) -> None:
    """Every alert in the section is one of the rules."""
    text = (project / "alerts/README.md").read_text("utf-8")
    section = text.partition("## By kind of host")[2].partition("\n## ")[0]
    assert set(re.findall(r"\b(?:Gpu|VramLedger)[A-Z]\w+", section)) <= {*alert_names()}
