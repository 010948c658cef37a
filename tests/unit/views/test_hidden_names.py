"""What others see of a snapshot and of a report where names are hidden."""

import json
import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support import builders
from tests.support.builders import GIB
from vramledger.accounting.uncharged.tracker import created
from vramledger.config import COLLECTORS
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.agent_report import ReportedRank
from vramledger.model.reading import HiddenHolder, Owner, ParentFacts, ProcessFacts, Rank
from vramledger.model.snapshot import (
    Grade,
    LeftBytes,
    OwnerLimit,
    OwnerOoms,
    ProcessSnapshot,
    Reservation,
    ReservationStatus,
    Snapshot,
    State,
    UnchargedBytes,
    UndividedBytes,
)
from vramledger.views.evidence import evidence_lines
from vramledger.views.hidden_names import HiddenNames, host_key
from vramledger.views.ledger_json import snapshot_json
from vramledger.web.page_rows import page_rows
from vramledger_agent.protocol.distributed_ranks import add_node, name_file

SECRET = re.compile(r"(?i)merger|quince|/home/|\b4711\b")
NAMES = HiddenNames(b"key")
PARENT = ParentFacts(5, 1, "merger", "merger-run.py", init=False, uid=4711, user="quince", program="mergerd")
RESERVED = Reservation("slurm", "7", "slurm", held=True, user="quince")


def full() -> Snapshot:
    """Return a snapshot with a name in every place that has one."""
    owner = Owner("user", "quince", unit="user@4711.service", notebook="/home/quince/merger.ipynb")
    meets = add_node(name_file("/home/quince/merger"), "node")
    facts = ProcessFacts(
        7, 7, 4711, "quince", "merger", "merger.py", parent=PARENT, owner=owner, rank=Rank(0, 2, meets),
        cgroup=("0::/user.slice/user-4711.slice/user@4711.service",),
        settings=(("CUDA_MPS_PIPE_DIRECTORY", "/home/quince/mps"),),
    )  # fmt: skip
    why = "its parent merger-run.py (pid 5) was seen alive and has ended; merger (pid 1) of quince adopted it"
    left = created(9, "quince", 1.0)
    said = f"NVML charges 0 MiB; 1.0 GiB {left}; pid 7 still has them"
    uncharged = UnchargedBytes(GIB, GIB, 0, Grade.INFERRED, said)
    held = replace(builders.holding(7, 3 * GIB, State.ORPHANED), why=why, uncharged=uncharged)
    one = replace(
        builders.device(0, [held]),
        hidden=(HiddenHolder(8, 8, "cuda", "merger.py", "quince", (0,)),),
        undivided=UndividedBytes(GIB, (7,), State.ORPHANED, wasted=False, owner=("user", "quince")),
        left=(LeftBytes(9, "quince", 1.0, 1, 2, (7,), left),),
        limits=(OwnerLimit("user", "quince", "/user.slice/user-4711.slice", GIB, 1, 1, 1),),
        reservation_status=ReservationStatus((RESERVED,), (), ("slurm",)),
    )
    known = ProcessSnapshot(7, 1.0, facts, first=facts, reported_rank=ReportedRank(0, 2, meets))
    ooms = (OwnerOoms("user", "quince", "torch", 1, 1.0),)
    return replace(builders.snapshot(one), processes={7: known}, ooms=ooms)


def texts(snapshot: Snapshot) -> dict[str, str]:
    """Return all that is written of a snapshot."""
    return {
        "metrics": Exposition(0, os.getppid).render(snapshot, ScrapeRequest(frozenset(COLLECTORS))).decode(),
        "JSON": json.dumps(snapshot_json(snapshot)),
        "page": json.dumps(page_rows(snapshot, {}, ready=True)),
        "evidence": "\n".join(evidence_lines(snapshot, 7)),
    }


def test_nothing_that_is_written_has_a_name() -> None:
    """No metric, JSON, row or evidence has a user, a program or a path; owners stay apart."""
    assert all(SECRET.search(text) for text in texts(full()).values()), "each of them has names otherwise"
    hidden = texts(NAMES.snapshot(full()))
    assert {name: SECRET.findall(text) for name, text in hidden.items() if SECRET.search(text)} == {}
    assert all(NAMES.user("quince") in text for text in hidden.values())


def test_a_report_has_stand_ins() -> None:
    """Owners, users and marks of a report have the same stand-ins as the present."""
    mark = {"owner": "user quince", "command": "merger.py", "kind": "oom"}
    owner = {"owner_type": "user", "owner": "quince", "users": ["quince"]}
    pod = {"owner_type": "pod", "owner": "ml/train", "users": ["quince"]}
    hidden = NAMES.report({"owners": [owner, pod], "leftovers": [mark], "ooms": [mark], "interruptions": []})
    assert SECRET.findall(json.dumps(hidden)) == []
    assert [each["owner"] for each in hidden["owners"]] == [NAMES.user("quince"), "ml/train"]
    assert hidden["ooms"][0]["owner"] == f"user {NAMES.user('quince')}"


@pytest.mark.parametrize("content", [None, ""])
def test_a_host_without_an_id_has_a_key_of_its_own(tmp_path: Path, content: str | None) -> None:
    """Stand-ins stay the same with the host's id, and nobody can guess them without one."""
    (tmp_path / "etc").mkdir()
    if content is not None:
        (tmp_path / "etc/machine-id").write_text(content)
    assert host_key(tmp_path) != host_key(tmp_path)
    (tmp_path / "etc/machine-id").write_text("0123456789abcdef\n")
    assert host_key(tmp_path) == host_key(tmp_path) == b"0123456789abcdef"
    assert HiddenNames(b"a").user("quince") != HiddenNames(b"b").user("quince")
