"""Machines that are known from documentation alone: ledgers, verdicts, and what people are told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import judging
from tests.support.judging import Entry
from tests.tools.recordings.machines import GIB, MACHINES, MIB, SEEN, Machine, write
from vramledger.model.snapshot import DeviceSnapshot, Snapshot
from vramledger.views.cleanliness import NOT_CLEAN, CheckTolerance, check_devices
from vramledger.views.table import render_table

ENTRIES = {entry.name: entry for entry in judging.load()}
DOCUMENT = Path("exporter/docs/MACHINES.md")


def last(name: str) -> Snapshot:
    """Replay a recording to its end."""
    return judging.replay(judging.HOME, ENTRIES[f"machine-{name}"])[-1]


def only(snapshot: Snapshot) -> DeviceSnapshot:
    """Return the only device."""
    (device,) = snapshot.devices
    return device


def status(snapshot: Snapshot) -> list[int]:
    """Return what check says of each device."""
    return [each.status for each in check_devices(snapshot, (), CheckTolerance())]


def test_the_recordings_are_those_of_the_program(tmp_path: Path) -> None:
    """Each recording by hand is what its maker writes, with the page that it must give."""
    write(tmp_path)
    for machine in MACHINES:
        for name in (machine.entry.file, f"{machine.entry.name}.metrics"):
            assert (tmp_path / name).read_bytes() == (judging.HOME / name).read_bytes(), name


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: str(machine.name))
def test_every_machine_says_that_it_was_not_seen(machine: Machine, project: Path) -> None:
    """Nobody takes a recording by hand for a measurement, and the table of machines names it."""
    entry: Entry = ENTRIES[machine.entry.name]
    assert SEEN in entry.note
    assert SEEN in entry.gpu
    assert f"`{entry.name}`" in (project / DOCUMENT).read_text("utf-8")


def test_every_test_of_the_table_exists(project: Path) -> None:
    """The files and recordings that the table of machines names are there."""
    table = [line for line in (project / DOCUMENT).read_text("utf-8").splitlines() if line.startswith("| ")]
    named = {name for line in table for name in re.findall(r"`([\w/.-]+)`", line.split("|")[-2])}
    for name in named:
        files = [project / name, *(project / "tests").rglob(name), judging.HOME / f"{name}.jsonl.gz"]
        assert any(path.exists() for path in files), name


def test_coherent_memory_blames_nobody() -> None:
    """The pages of the ended program are the operating system's; only the live holder makes the GPU busy."""
    snapshot = last("coherent")
    device = only(snapshot)
    assert device.ledger is not None
    assert (device.ledger.operating_system, device.ledger.unattributed) == (48 * GIB, 0)
    assert status(snapshot) == [NOT_CLEAN]
    assert [
        reason.pid for each in check_devices(snapshot, (), CheckTolerance()) for reason in each.reasons
    ] == [2002]
    assert "page cache 5.00 GiB, memory of programs 2.00 GiB" in render_table(snapshot)
    assert device.owner_usage is not None
    assert [(each.freed, each.not_freed) for each in device.owner_usage.owners] == [(None, 0)]


def test_cdmm_is_an_ordinary_gpu() -> None:
    """Without a NUMA node there is no part of the operating system."""
    ledger = only(last("cdmm")).ledger
    assert ledger is not None
    assert (ledger.operating_system, ledger.unattributed) == (None, 9 * MIB)


def test_unified_memory_is_the_hosts() -> None:
    """The ledger of a GB10 is over the host's memory, and its holder keeps NVML's figure."""
    device = only(last("unified"))
    assert device.ledger is not None
    assert device.ledger.total == 127_600_748 * 1024
    assert device.ledger.operating_system == 28 * GIB - 19_135 * MIB
    assert [each.memory for each in device.holdings] == [19_135 * MIB]
