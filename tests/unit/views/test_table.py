"""What people see: the table, the timeline, and what to do."""

import json
from collections.abc import Iterator
from contextlib import suppress
from copy import deepcopy
from itertools import islice
from typing import Any

import msgspec
import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.support.builders import (
    GIB,
    MIB,
    RESERVED,
    TOTAL,
    coherent_device,
    device,
    failed,
    holding,
    managed,
    process,
    snapshot,
)
from tests.support.sure import sure
from vramledger.accounting.tracker import HoldingTracker
from vramledger.errors import RecordingError
from vramledger.model.reading import HiddenHolder, Owner, Reading, decode, encode
from vramledger.model.snapshot import (
    Grade,
    LeftBytes,
    Policy,
    Snapshot,
    State,
    UnchargedBytes,
    UndividedBytes,
)
from vramledger.sampling.replay import demo_recording, read_recording
from vramledger.verdicts.remedies import about_hidden, about_unattributed, allocator_advice, remedy
from vramledger.views.evidence import evidence_lines
from vramledger.views.table import render_table, table_parts
from vramledger.views.timeline import SPAN, STEP, HoldingGrowth, Timeline
from vramledger_agent.printable import Control


@pytest.mark.parametrize("ghost", [True, False, None])
def test_a_ghost_device_says_so(ghost: bool | None) -> None:
    """A GPU that is busy without anybody has a line that says what helps; any other GPU has none."""
    one = replace(device(0, utilization={"gpu": 1.0, "memory": 0.0}), ghost=ghost)
    assert ("GHOST: 100% busy for minutes" in render_table(snapshot(one))) is (ghost is True)


def test_uncharged_memory_is_shown_beside_what_nvml_charges() -> None:
    """A holder shows all that it has, or how much more it can have; below the ledger is who shares what."""
    left = LeftBytes(694, "alice", 0.0, 4096 * MIB, 4096 * MIB, (8, 9), "created by pid 694 of alice")
    shared = UndividedBytes(4096 * MIB, (8, 9), State.ACTIVE, False, None)
    held = [holding(7, uncharged=managed(2048 * MIB)), holding(8, uncharged=managed(0, 4096 * MIB))]
    table = render_table(snapshot(replace(device(0, held, undivided=shared), left=(left,))))
    assert "2.50 GiB (2.00 GiB uncharged)" in table
    assert "0.50 GiB (up to 4.00 GiB more)" in table
    assert "undivided: 4.00 GiB that NVML charges to nobody are in one or several of pid 8, 9" in table
    assert "left behind: 4.00 GiB created by pid 694 of alice; held by one or several of pid 8, 9" in table


FORGED = "\nGPU 9 \x1b[H\x1b[2J\x1b[0m"


def leaves(value: Any, *place: Any) -> Iterator[tuple[Any, ...]]:  # noqa: ANN401 JSON
    """Yield where in a value the texts are."""
    if isinstance(value, str):
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in items:
        yield from leaves(each, *place, key)


@pytest.mark.parametrize(("moment", "least"), [(None, 20), (Reading(1.0, 2.0, failure=("lost", "gone")), 1)])
def test_no_text_of_a_recording_begins_a_line_or_controls_a_terminal(
    moment: Reading | None, least: int
) -> None:
    """Whichever text of a reading a stranger has written, lines and controls are ours alone."""
    reading = json.loads(encode(moment or next(islice(read_recording(demo_recording()), 900, None))))
    kinds = {tuple("" if isinstance(key, int) else key for key in place): place for place in leaves(reading)}
    tried = 0
    for place in kinds.values():
        told = deepcopy(reading)
        at = told
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] += FORGED
        with suppress(RecordingError):  # what has only a few values is refused
            tracker = HoldingTracker(idle_after=180.0, source="replay", recording=FORGED)
            shot = tracker.update(decode(json.dumps(told)))
            table = [*table_parts(shot, colour=True)]
            ours = [part for part in table if isinstance(part, Control)]
            assert all(part.isprintable() for part in table if part != "\n" and part not in ours)
            assert bool(ours) == bool(shot.processes), "the states have colours"
            assert all(line.isprintable() for pid in shot.processes for line in evidence_lines(shot, pid))
            tried += 1
    assert tried >= least


BEGIN = 1_790_000_000.0


def at(seconds: float, memory: int = MIB, *, pid: int = 7) -> Snapshot:
    """Make a sample with one holder, this many seconds after the beginning."""
    return replace(snapshot(device(0, [holding(pid, memory)])), time=BEGIN + seconds)


def told(timeline: Timeline) -> tuple[list[float], dict[str, list[Any]]]:
    """Return the times and the first device's columns."""
    found = timeline.history()
    return found.times, msgspec.to_builtins(found.devices[0].memory) if found.devices else {}


def test_every_step_balances() -> None:
    """In each step the parts add up to the device's total."""
    timeline = Timeline()
    for second in range(20):
        timeline.record(at(second, second * MIB))
    times, memory = told(timeline)
    assert times == [BEGIN, BEGIN + 5, BEGIN + 10, BEGIN + 15]
    for place in range(len(times)):
        parts = [memory[name][place] for name in memory if name not in ("total", "operating_system")]
        assert sum(parts) == memory["total"][place] == TOTAL
    assert memory["operating_system"] == [None] * len(times)


@pytest.mark.parametrize("reserved", [None, 0, 5 * MIB])
def test_parts_that_not_every_device_has(reserved: int | None) -> None:
    """The operating system's part is kept with and without a driver's reserve; a missing one is null."""
    timeline = Timeline()
    coherent = coherent_device()
    ledger = replace(sure(coherent.ledger), driver_reserved=reserved)
    timeline.record(replace(snapshot(replace(coherent, ledger=ledger)), time=BEGIN))
    _, memory = told(timeline)
    assert (memory["driver_reserved"], memory["operating_system"]) == ([reserved], [ledger.operating_system])
    assert memory["total"] == [TOTAL - (RESERVED - (reserved or 0))]


def test_what_a_step_has() -> None:
    """The most of its samples; a failed one is a gap; a clock that goes back begins again."""
    timeline = Timeline()
    for second, size in enumerate((1, 9, 2, 3)):
        timeline.record(at(second, size * MIB))
    assert told(timeline)[1]["active"] == [9 * MIB]
    timeline = Timeline()
    timeline.record(at(0))
    timeline.record(replace(failed(), time=BEGIN + 5))
    timeline.record(at(10))
    assert told(timeline)[1]["active"] == [MIB, None, MIB]
    assert told(timeline)[1]["total"] == [TOTAL, None, TOTAL]
    timeline = Timeline()
    timeline.record(at(500))
    timeline.record(at(0))
    assert told(timeline)[0] == [BEGIN]
    assert told(Timeline()) == ([], {})


def test_memory_is_bounded() -> None:
    """After hours there are 15 minutes, and devices and holders that are gone are forgotten."""
    timeline = Timeline()
    timeline.record(replace(snapshot(device(1, [holding(9)])), time=BEGIN))
    for second in range(0, 7200, 2):
        timeline.record(at(second, pid=100 + second // 100))
    times, _ = told(timeline)
    assert len(times) == SPAN / STEP + 1
    assert [each.gpu for each in timeline.history().devices] == [0]
    assert len(timeline.state.holdings) <= 2


def test_growth_is_over_the_last_quarter_of_an_hour() -> None:
    """A holding's growth counts from its size 15 minutes ago, or from its first sample, which has none."""
    timeline = Timeline()
    timeline.record(at(0))
    assert timeline.growth(at(0)) == {}
    for second in range(1, 3601):
        timeline.record(at(second, MIB + second * 1024))
    ((_, growth),) = timeline.growth(at(3600, MIB + 3600 * 1024)).items()
    assert 840 <= growth.seconds <= 900
    assert growth == HoldingGrowth(int(growth.seconds) * 1024, growth.seconds)


@pytest.mark.parametrize("working", [True, False, None])
@pytest.mark.parametrize("state", State)
def test_every_state_but_active_has_a_remedy(state: State, *, working: bool | None) -> None:
    """Each state but active says what to do, with its pid; who copies a hint gets a dry run."""
    hint = remedy(replace(holding(4711, state=state), working=working), process(4711), device(3)) or ""
    assert (hint == "") == (state is State.ACTIVE)
    assert "{" not in hint
    assert "--yes" not in hint
    assert "4711" in hint or state in (State.ACTIVE, State.DEAD, State.STUCK, State.UNKNOWN)
    assert "vramledger end" not in hint or "`vramledger end --pid 4711`" in hint


@pytest.mark.parametrize(
    ("framework", "policy", "says"),
    [
        ("tensorflow", "preallocate", "TF_FORCE_GPU_ALLOW_GROWTH=true"),
        ("jax", "fraction", "XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        ("torch", "caching", "torch.cuda.empty_cache()"),
        ("onnxruntime", "growth", "only the end of the program"),
    ],
)
def test_an_idle_holder_learns_of_its_policy(framework: str, policy: str, says: str) -> None:
    """Besides asking its user, the sentence says which setting of its framework helps."""
    known = replace(process(7), policy=Policy(framework, policy, "pattern", "seen"))
    todo = sure(remedy(holding(7, state=State.IDLE), known, device(0)))
    assert "Ask its user" in todo
    assert says in todo


def test_a_notebook_is_shut_down_by_its_user() -> None:
    """No sentence says to kill a notebook's kernel from outside."""
    owner = Owner("user", "ada", notebook="a.ipynb")
    known = replace(process(7), facts=structs.replace(sure(process(7).facts), owner=owner))
    todo = remedy(holding(7, state=State.IDLE), known, device(0))
    assert todo == "Ask its user to shut the notebook's kernel down."


def test_unattributed_memory_is_explained_as_far_as_is_known() -> None:
    """Hidden holders, none, or not known; beyond contexts, who could have a part and who made it."""
    stray = HiddenHolder(77, 1, "cuda", "x", None, (0,))
    watcher = HiddenHolder(78, 1, "monitor", "y", None, (0,))
    assert about_unattributed(device(0, unattributed=0)) is None
    assert "pid 77." in str(about_unattributed(device(0, hidden=(stray, watcher))))
    assert "was not freed" in str(about_unattributed(device(0, hidden=(watcher,))))
    assert "not known here" in str(about_unattributed(device(0)))
    assert len({about_hidden(kind) for kind in ("cuda", "monitor", "inherited", "unknown")}) == 4
    several = UnchargedBytes(0, GIB, 0, Grade.INFERRED, "")
    left = LeftBytes(694, "alice", 0.0, GIB, GIB, (), "created by pid 694 of alice, which ended at 03:12 UTC")
    able = device(0, [replace(holding(7), uncharged=several)], unattributed=4 * GIB, hidden=())
    assert "No holder is known to map" in str(about_unattributed(device(0, unattributed=4 * GIB, hidden=())))
    assert "pid 7 can have a part" in str(about_unattributed(able))
    assert "created by pid 694 of alice" in str(about_unattributed(replace(able, left=(left,))))
    assert "map" not in str(about_unattributed(device(0, unattributed=9 * MIB, hidden=())))


def test_memory_of_the_dead_may_be_kept_by_a_child() -> None:
    """Where a hidden process has the device open, it is to be ended first, before anybody resets the GPU."""
    child = HiddenHolder(1203, 1, "cuda", "x", None, (0,))
    for state in (State.DEAD, State.ZOMBIE):
        todo = str(remedy(holding(7, state=state), None, device(0, hidden=(child,))))
        assert todo.startswith("Hidden pid 1203 has the device open")
        assert "`vramledger end --pid 1203` first" in todo
    assert "Hidden" not in str(remedy(holding(7, state=State.DEAD), None, device(0, hidden=())))


@pytest.mark.parametrize(
    ("reserved", "between", "settings", "words"),
    [
        (10 * GIB, 4 * GIB, {"expandable_segments": "false"}, "at the next start makes"),
        (10 * GIB, 4 * GIB, {}, "if that is not set already"),
        (10 * GIB, 4 * GIB, {"expandable_segments": "false", "max_split_size_mb": "64"},
         "instead of max_split"),
        (10 * GIB, 4 * GIB, {"expandable_segments": "true"}, None),
        (100 * GIB, 4 * GIB, {"expandable_segments": "false"}, None),
        (GIB // 2, GIB // 8, {"expandable_segments": "false"}, None),
        (None, 4 * GIB, {}, None),
        (10 * GIB, None, {}, None),
    ],
)  # fmt: skip
def test_advice_about_the_allocator_knows_its_settings(
    reserved: int | None, between: int | None, settings: dict[str, str], words: str | None
) -> None:
    """A setting is advised where it frees much and is not set; what is not known is said."""
    advice = allocator_advice(reserved, between, settings)
    assert (advice is None) == (words is None)
    assert words is None or words in str(advice)
