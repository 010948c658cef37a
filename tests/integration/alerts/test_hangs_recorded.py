"""What pages when real jobs hang: recordings of two H100s, held at the hang, through the shipped rules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.support.alerts.promtool import ALERTS, STEP, evaluation_order
from tests.support.faults import rules
from tests.support.faults.evaluation import Manager, ask
from tests.support.faults.recorded import play
from tests.support.host.scrapes import SCRAPE
from tests.support.host.series import Trace
from tests.support.requirements import VERSIONS, require_version

pytestmark = pytest.mark.timeout(600)  # promtool takes its time where others work too

HOME = Path(__file__).parents[2] / "recordings" / "two-gpus"


def cut(name: str, end: float, folder: Path) -> Path:
    """Write the part of a recording before a monotonic time; return its path."""
    with gzip.open(HOME / f"{name}.jsonl.gz", "rt") as lines:
        head = next(lines)
        kept = [line for line in lines if json.loads(line)["monotonic"] < end]
    path = folder / f"{name}.jsonl"
    path.write_text(head + "".join(kept))
    return path


def alerts(
    path: Path, minutes: int, folder: Path, version: str, *, stretch: float = 1.0
) -> set[tuple[str, ...]]:
    """Return name, severity, pid and rank of the alerts that fire when a recording's end has lasted.

    ``stretch``: by how much the time of the recording is drawn out before.
    """
    trace = play(path, rules.families(), Trace("n", every=SCRAPE), stretch=stretch, hold=minutes * 60.0)
    at = int((trace.slots - 1) * SCRAPE) // STEP * STEP
    manager = Manager(STEP, ALERTS, evaluation_order(), require_version("promtool", version))
    found = ask('ALERTS{alertstate="firing",severity!="none"}', [at], trace.series(), folder, manager)
    keys = ("alertname", "severity", "pid", "rank")
    return {tuple(dict(labels).get(key, "") for key in keys) for labels in found}


STOPPED_LONG = 360.0
"""Two minutes after a rank of one job was stopped; the other job's rank was stuck in a loop in Python."""


def test_a_stopped_rank_pages_once(tmp_path: Path) -> None:
    """Held for 40 minutes, the stopped rank pages, and the rank that waits for it does not."""
    found = alerts(cut("hangs", STOPPED_LONG, tmp_path), 40, tmp_path, VERSIONS[0])
    assert ("GpuJobHung", "page", "1172", "1") in found
    assert [each for each in found if each[1] == "page"] == [("GpuJobHung", "page", "1172", "1")]


def test_each_lost_rank_of_jobs_that_share_gpus_pages(tmp_path: Path) -> None:
    """Of four jobs that hang on the same two GPUs, the stopped and the killed rank page; nobody else does.

    Of the rank that left its loop only inferred idleness is known beside the others, and the two ranks that
    wait for each other are both busy: these jobs are only listed.
    """
    path = cut("hangs-in-turns", 198.0, tmp_path)
    found = alerts(path, 42, tmp_path, VERSIONS[0], stretch=4.0)
    about = {
        (name, severity, pid) for name, severity, pid, _ in found if name.startswith(("GpuJob", "GpuBusy"))
    }
    lost = {("GpuJobHung", "page", pid) for pid in ("586", "588")}
    assert about == lost | {("GpuBusyWithoutWork", "info", pid) for pid in ("589", "591", "592")}
