"""Recordings of real GPUs raise the right alerts: held at their last moment, or stretched."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import judging
from tests.support.faults import rules
from tests.support.faults.evaluation import Firing, Manager, evaluate
from tests.support.faults.recorded import FAULTS, STRETCH, play
from tests.support.host.series import Trace
from tests.support.judging import Entry

pytestmark = [pytest.mark.timeout(600), pytest.mark.thorough]  # promtool takes its time where others work too

HELD = 80 * 60.0
"""Seconds for which the last moment of a recording is held: long enough to count as hoarded."""

EVERY = 30.0
"""Seconds between two scrapes of what is held: nothing changes any more."""

LOOKS = 2
"""Minutes: each alert that fires goes on for as long at least."""

Raised = set[tuple[str, str]]
"""Alert and the role of the process that it names; ``-`` if it names none."""

RAISED: dict[str, Raised] = {
    "agents": {
        ("GpuFrameworkCacheHigh", "cache"),
        ("GpuOutOfMemory", "failed"),
    },
    "hidden-holder": {("GpuHiddenHolder", "-")},
    # It also made an unused context on the second card, and then slept with three quarters of the first.
    "jax-preallocation": {("GpuStrayContext", "holder"), ("GpuMemoryHoarded", "holder")},
    "lively": {
        ("GpuMemoryStopped", "stopped"), ("GpuMemoryOrphaned", "worker-1"), ("GpuMemoryOrphaned", "worker-2"),
    },
    "machine-hidepid": {("VramLedgerBlind", "-"), ("VramLedgerCollectorFailing", "-")},
    "machine-limits": {("GpuMemoryLimitNear", "-")},
    # An instance whose counters say that no kernel ran.
    "machine-mig": {("GpuMemoryHoarded", "holder-1")},
    "machine-orin-unprivileged": {("VramLedgerBlind", "-")},
    "machine-wsl2": {("VramLedgerBlind", "-")},
    "notebook-kernel": {("GpuNotebookIdle", "kernel"), ("GpuMemoryHoarded", "kernel")},
    "pid-namespace-inside": {("VramLedgerBlind", "-")},
    **{
        f"orphans-{how}": {("GpuMemoryOrphaned", "worker-1"), ("GpuMemoryOrphaned", "worker-2")}
        for how in ("spawn", "spawn-late")
    },
    # All of its programs are of one user, who shares with nobody.
    "policies": {("GpuMemoryHoarded", "jax"), ("GpuMemoryHoarded", "fraction")},
    "stopped": {("GpuMemoryStopped", "holder")},
    **{
        f"torchrun-{seen}": {("GpuMemoryOrphaned", "rank-0"), ("GpuMemoryOrphaned", "rank-1")}
        for seen in ("ranks", "ranks-late")
    },
    # A program without CUDA keeps the memory by a descriptor alone: nobody can say so.
    "uncharged-kept-descriptor": {("GpuMemoryUnattributed", "-")},
    # 79 GiB of managed memory, of which NVML charges 518 MiB.
    "uncharged-oversubscribed": {("GpuMemoryHoarded", "managed")},
    "zombie-leader": {("GpuMemoryZombie", "leader")},
    # Programs of one user that do nothing, each with a little.
    **{
        f"uncharged-{name}": {("GpuMemoryHoardedInPieces", "-")}
        for name in ("among-ten", "late-among-ten", "pair")
    },
}  # fmt: skip
"""The alerts of each recording when nothing changes any more; a recording without an entry has none.

That children of ``fork`` and ``subprocess`` are orphans is inferred, and nothing is said of it.

In ``agents``, ``busy-and-idle`` and ``lively`` a program keeps the device busy, so that the others are idle
only by inference, and nobody is called a hoarder.
"""

TRUE_BESIDES = frozenset({"GpuMemoryNearlyFull", "GpuMemoryFilling"})
"""About the device, where several programs have just taken most of it."""

PLANTED: Raised = {
    ("GpuMemoryLeakSuspected", "gradients"), ("GpuMemoryLeakSuspected", "evaluations"),
    ("GpuMemoryLeakSuspected", "cache"), ("GpuMemoryFragmented", "fragments"),
    ("GpuNotebookIdle", "notebook"), ("GpuMemoryOrphaned", "worker-1"), ("GpuMemoryOrphaned", "worker-2"),
}  # fmt: skip
"""The alerts for which the programs of ``tests/lab/recordings/faults.py`` were made."""

ENTRIES = {entry.name: entry for entry in judging.load()}


def raised(entry: Entry, firings: list[Firing]) -> Raised:
    """Return what fired for a recording, by the roles of its processes."""
    return {
        (each.alert, entry.roles[int(each.labels["pid"])] if "pid" in each.labels else "-")
        for each in firings
        if each.labels.get("instance") == entry.name
    }


@pytest.fixture(scope="module")
def firings(require_tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> list[Firing]:
    """Return what fires over all recordings, each held at its last moment."""
    require_tool("promtool")
    names = rules.families()
    traces = [
        play(judging.HOME / entry.file, names, Trace(entry.name, every=EVERY), hold=HELD)
        for entry in ENTRIES.values()
        if entry.name != FAULTS
    ]
    return evaluate(traces, tmp_path_factory.mktemp("recorded"), Manager(60.0, scrape=EVERY), LOOKS)


@pytest.mark.parametrize("name", sorted(ENTRIES.keys() - {FAULTS}))
def test_a_recording_raises_what_it_should(name: str, firings: list[Firing]) -> None:
    """Each alert fires for the right process, and no other alert fires."""
    found = {each for each in raised(ENTRIES[name], firings) if each[0] not in TRUE_BESIDES}
    assert found == RAISED.get(name, set())


def test_the_main_faults_are_found_in_their_recording(
    require_tool: Callable[[str], Path], tmp_path: Path
) -> None:
    """Faulty programs on a real GPU are found, each by its alert; a false leak is not."""
    require_tool("promtool")
    entry = ENTRIES[FAULTS]
    trace = play(judging.HOME / entry.file, rules.families(), Trace(entry.name), stretch=STRETCH)
    asked = {alert for alert, _ in PLANTED} | {"GpuMemoryLeakSuspected"}
    found = raised(entry, evaluate([trace], tmp_path, Manager(30.0, alerts=asked)))
    assert found >= PLANTED
    assert ("GpuMemoryLeakSuspected", "lengths") not in found
