"""The bundled recording, which every new user sees first."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import demo
from tests.support.faults import rules
from tests.support.faults.evaluation import Manager, evaluate
from tests.support.faults.recorded import play
from tests.support.host.series import Trace
from vramledger.accounting.tracker import HoldingTracker
from vramledger.model.snapshot import Grade, Snapshot, State
from vramledger.sampling.replay import demo_recording, read_recording

TEXT = gzip.decompress(demo_recording().read_bytes())

FIRES = {
    # Alert and severity, the pid that it names, and by which minute of the recording it fires.
    ("GpuOutOfMemory", "warning", "4377"): 8,
    ("GpuMemoryOrphaned", "warning", "4619"): 12,
    ("GpuMemoryOrphaned", "page", "4619"): 34,
    ("GpuMemoryLeakSuspected", "warning", "4120"): 36,
    ("GpuMemoryPreallocatedShared", "warning", "4410"): 20,
    ("GpuMemoryFilling", "warning", ""): 42,
    ("GpuOutOfMemory", "warning", "4120"): 46,
}


def test_the_generator_writes_it_again(tmp_path: Path) -> None:
    """The same seed gives the same readings, byte for byte; compression may differ between machines."""
    path = tmp_path / "demo.jsonl.gz"
    demo.write(path)

    same = gzip.decompress(path.read_bytes()) == TEXT
    assert same, "python -m tests.lab.demo writes it"  # pytest takes minutes to show how 4 MB differ


def test_it_says_that_it_is_simulated_and_is_small() -> None:
    """Its header says that it is simulated; 40 minutes take less than 1 MB of the package."""
    header = json.loads(TEXT.partition(b"\n")[0])
    first, *_, last = read_recording(demo_recording())

    assert header["simulated"] is True
    assert "no such machine" in header["note"]
    assert demo_recording().stat().st_size < 1_000_000
    assert last.time - first.time >= 40 * 60


@pytest.fixture(scope="module")
def minutes() -> list[Snapshot]:
    """Return the ledger at the beginning of each minute."""
    tracker = HoldingTracker(idle_after=demo.IDLE_AFTER)
    shots = [tracker.update(reading) for reading in read_recording(demo_recording())]
    return shots[:: round(60 / demo.INTERVAL)]


def test_it_shows_what_we_are_for(minutes: list[Snapshot]) -> None:
    """Owners, states, frameworks, policies and agents: the demo has everything that it promises."""
    shot = minutes[30]
    held = {holding.pid: holding for device in shot.devices for holding in device.holdings}
    people = shot.processes
    owned = [person.facts.owner_or_user for person in people.values() if person.facts is not None]
    owners = {owner.type for owner in owned if owner is not None}

    assert {"pod", "slurm"} <= owners
    assert (held[4502].state, held[4502].grade) == (State.IDLE, Grade.SEEN)
    assert shot.devices[2].reading.activity is None
    assert held[4619].state is State.ORPHANED
    assert {people[pid].policy.policy for pid in (4120, 4410, 4701)} == {"caching", "preallocate", "fraction"}
    assert set(shot.agents) == {4120, 4377, 4410, 4502, 4533}
    assert len(shot.agents) > len(held) / 2
    (pool,) = shot.agents[4502].pools[shot.devices[2].reading.uuid]
    assert pool.figures["reserved"] > 5 * pool.figures["allocated"]


def test_every_holding_has_a_framework_and_a_policy(minutes: list[Snapshot]) -> None:
    """From the end of the first minute on, every holder has a framework and a policy."""
    for shot in minutes[1:]:
        assert [
            pid
            for pid, person in shot.processes.items()
            if "unknown" in (person.policy.framework, person.policy.policy)
        ] == []


@pytest.mark.timeout(600)
def test_its_alerts_arrive(require_tool: Callable[[str], Path], tmp_path: Path) -> None:
    """The shipped rules fire in turn over the recording, as Prometheus scrapes it at its own pace."""
    require_tool("promtool")
    trace = play(demo_recording(), rules.families(), Trace("demo"))
    begun: dict[tuple[str, str, str], float] = {}
    for firing in evaluate([trace], tmp_path, Manager(60.0, alerts={alert for alert, _, _ in FIRES})):
        begun.setdefault((firing.alert, firing.severity, firing.labels.get("pid", "")), firing.begin / 60)

    assert {key: minute for key, minute in FIRES.items() if begun.get(key, 99) > minute} == {}


def test_it_adds_up(minutes: list[Snapshot]) -> None:
    """No GPU of the demo holds more than it has: none of its bytes would be charged twice."""
    for shot in minutes:
        assert [each.ledger.overlap for each in shot.devices if each.ledger] == [0] * 4
