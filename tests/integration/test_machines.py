"""Machines that are known from documentation alone: ledgers, verdicts, and what people are told."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import judging
from tests.support.host.model import GIB, MIB
from tests.support.judging import Entry
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.reading import decode
from vramledger.model.snapshot import Snapshot, State
from vramledger.sampling.replay import read_recording
from vramledger.storage.reduction import expand_reading, reduce_reading
from vramledger.verdicts.cleanliness import CANNOT_TELL, NOT_CLEAN, CheckTolerance, check_devices
from vramledger.views.table import render_table

ENTRIES = {entry.name: entry for entry in judging.load()}
DOCUMENT = Path("exporter/docs/MACHINES.md")
SEEN = "from documentation, not seen"

MACHINES = [each for name, each in ENTRIES.items() if name.startswith("machine-")]
of_each_machine = pytest.mark.parametrize("entry", MACHINES, ids=lambda entry: entry.name)


def last(name: str) -> Snapshot:
    """Replay a recording to its end."""
    return judging.replay(judging.HOME, ENTRIES[f"machine-{name}"])[-1]


@pytest.mark.parametrize(
    ("name", "status"),
    [("coherent", NOT_CLEAN), ("orin", NOT_CLEAN), ("orin-unprivileged", CANNOT_TELL), ("wsl2", CANNOT_TELL)],
)
def test_check_of_a_machine(name: str, status: int) -> None:
    """Memory of the operating system or of Windows never counts as left over; what is hidden is a doubt."""
    assert [each.status for each in check_devices(last(name), (), CheckTolerance())] == [status]


@of_each_machine
def test_every_machine_says_that_it_was_not_seen(entry: Entry, project: Path) -> None:
    """Nobody takes a recording by hand for a measurement, and the table of machines names it."""
    assert all(SEEN in each for each in (entry.note, entry.gpu))
    assert f"`{entry.name}`" in (project / DOCUMENT).read_text("utf-8")


def test_every_test_of_the_table_exists(project: Path) -> None:
    """The files and recordings that the table of machines names are there."""
    _, _, rest = (project / DOCUMENT).read_text("utf-8").partition("| recording or test |\n")
    table, _, _ = rest.partition("\n\n")
    named = {name for line in table.splitlines() for name in re.findall(r"`([\w/.-]+)`", line.split("|")[-2])}
    assert named
    for name in named:
        files = [project / name, *(project / "tests").rglob(name), judging.HOME / f"{name}.jsonl.gz"]
        assert any(path.exists() for path in files), name


@pytest.mark.parametrize(("failed", "unknown"), [((), 4 * GIB + 9 * MIB), (("processes",), None)])
def test_a_vgpu_without_a_list_blames_nobody(failed: tuple[str, ...], unknown: int | None) -> None:
    """Where the driver has no list, all used bytes are unknown; where its list fails, there is no ledger."""
    (reading, *_) = read_recording(judging.HOME / ENTRIES["machine-vgpu"].file)
    (gpu,) = reading.devices
    silent = replace(reading, devices=(replace(gpu, processes=None, failed=failed),), rows=(), facts=())
    (device,) = HoldingTracker(idle_after=6).update(silent).devices
    ledger = device.ledger
    assert (ledger and ledger.states[State.UNKNOWN]) == unknown
    assert ledger is None or ledger.unattributed == 0


def test_what_nothing_counts_cannot_be_known() -> None:
    """Where nothing counts work, on an instance without GPM, the evidence says so."""
    (holding,) = last("mig-without-gpm").devices[1].holdings
    assert "cannot be known" in holding.why
    assert (holding.working, holding.wasted) == (None, False)


def test_instances_are_named_by_profile_and_place() -> None:
    """Instances of one profile differ by their place, and no profile is written twice."""
    titles = [line for line in render_table(last("mig")).splitlines() if line.startswith("GPU 0")]
    assert [line.split("  ")[1] for line in titles[1:]] == [
        f"NVIDIA H100 80GB HBM3 MIG 1g.10gb at {place}:1" for place in range(4)
    ]


@of_each_machine
def test_the_past_knows_the_machine_too(entry: Entry) -> None:
    """What a storage keeps of a reading gives the same ledgers: no past blames anybody for other bytes."""
    live, past = (HoldingTracker(idle_after=6, interval=1) for _ in range(2))
    for reading in read_recording(judging.HOME / entry.file):
        raw = json.loads(json.dumps(reduce_reading(reading)))
        stored = decode(json.dumps(expand_reading(raw, reading.time)))
        shown, found = live.update(reading), past.update(stored)
    assert [each.ledger for each in shown.devices] == [each.ledger for each in found.devices]
    assert render_table(shown).count("at ") == render_table(found).count("at ")
