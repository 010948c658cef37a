"""The verdict for a Slurm job: what running jobs may have, and the reason in one line."""

import pytest

from tests.support.builders import device, failed, holding, snapshot
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Snapshot, State
from vramledger.slurm.jobs import JobRecord, NodeJobs
from vramledger.slurm.verdict import SlurmQuestion, check_job_devices, reason_line
from vramledger.verdicts.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    NOT_CLEAN,
    CheckTolerance,
    SearchExtent,
    overall_status,
)

GIB = 2**30


def status(
    device: DeviceSnapshot, jobs: NodeJobs, owners: dict[int, str], *, ended: str = "", name: str = "nvidia0"
) -> int:
    """Judge one device; ``owners`` has the jobs of pids."""
    question = SlurmQuestion((name,), ended, CheckTolerance())
    possible = {pid: (job,) for pid, job in owners.items()}
    results = check_job_devices(snapshot(device), question, jobs, lambda pid: possible.get(pid, ()))
    return overall_status(results)


@pytest.mark.parametrize(
    ("running", "record", "ended", "expected"),
    [
        ({"7"}, ("nvidia0",), "", CLEAN),
        ({"7"}, None, "", CLEAN),
        ({"7"}, ("nvidia1",), "", NOT_CLEAN),
        (set(), ("nvidia0",), "", NOT_CLEAN),
        ({"7"}, ("nvidia0",), "7", NOT_CLEAN),
    ],
)
@pytest.mark.parametrize("state", [State.ACTIVE, State.IDLE, State.ZOMBIE, State.ORPHANED, State.STOPPED])
def test_a_holder_of_a_job(
    running: set[str], record: tuple[str, ...] | None, ended: str, expected: int, state: State
) -> None:
    """In any state it is not a leftover while its job runs, on a GPU that the job has, as far as is known."""
    records = {"7": JobRecord("7", devices=record)} if record is not None else {}
    held = device(holdings=[holding(41, 20 * GIB, state)])
    assert status(held, NodeJobs(dict.fromkeys(running, 1), records), {41: "7"}, ended=ended) == expected


def test_a_sluid_without_a_record() -> None:
    """A cgroup's SLUID may be that of any job that runs: it drains nothing as long as one does."""
    held = device(holdings=[holding(41, 20 * GIB)])
    owners = {41: "s7KXM81KTA2V00"}
    assert status(held, NodeJobs({"7": 1}), owners) == CLEAN
    assert status(held, NodeJobs(), owners) == NOT_CLEAN
    named = NodeJobs(records={"7": JobRecord("7", "s7KXM81KTA2V00")})
    assert named.number("s7KXM81KTA2V00") == "7"


def test_what_is_dead_belongs_to_nobody() -> None:
    """Memory of a process that is gone is left over, beside running jobs too."""
    held = device(holdings=[holding(41, GIB), holding(42, GIB, State.DEAD)])
    assert status(held, NodeJobs({"7": 1}), {41: "7"}) == NOT_CLEAN


def test_a_gpu_that_the_driver_does_not_list() -> None:
    """A job's GPU that is missing cannot be judged."""
    assert status(device(), NodeJobs(), {}, name="nvidia5") == CANNOT_TELL


def test_a_hidden_program_of_a_running_job() -> None:
    """A program that NVML does not list counts unless it belongs to a job that has the GPU."""
    held = device(hidden=(HiddenHolder(41, 1, "cuda", "train", "ada", (0,)),))
    assert status(held, NodeJobs(), {}) == NOT_CLEAN
    assert status(held, NodeJobs({"7": 1}), {41: "7"}) == CLEAN


def reason(shown: Snapshot) -> str:
    """Return the reason for all devices of a snapshot."""
    question = SlurmQuestion(None, "", CheckTolerance())
    return reason_line(check_job_devices(shown, question, NodeJobs(), lambda _: ()), shown)


@pytest.mark.parametrize(
    ("held", "begins"),
    [
        (device(holdings=[holding(41, 20 * GIB)]), "vram GPU0 ada 20GiB: "),
        (device(3, [holding(41, GIB), holding(42, 11 * GIB, State.DEAD)]), "vram GPU3 dead 11GiB: "),
        (device(holdings=[holding(41, 300 * 2**20)]), "vram GPU0 ada 300MiB: "),
        (device(unattributed=8 * GIB), "vram GPU0 nobody 8GiB: "),
        (device(holdings=[holding(41, None)]), "vram GPU0 ada: "),
        (device(hidden=(HiddenHolder(9, 1, "cuda", "x", "bob", (0,)),)), "vram GPU0 bob: "),
    ],
)
def test_the_reason_names_gpu_holder_and_size_first(held: DeviceSnapshot, begins: str) -> None:
    """The largest comes first, others are counted, and the UUID is the end."""
    line = reason(snapshot(held))
    assert line.startswith(begins)
    assert line.endswith(held.reading.uuid)
    assert (" more; " in line) == (len(held.holdings) > 1)


def test_the_reason_without_a_driver() -> None:
    """What is not known is marked, and a clean node has no reason."""
    assert reason(failed()).startswith("vram? ")
    assert reason(snapshot(device())) == ""


def test_a_command_cannot_forge_the_reason() -> None:
    """A program's name with control characters stays in one printable line."""
    shown = snapshot(device(hidden=(HiddenHolder(9, 1, "cuda", "a\nReason=\x1b[2J", "bob", (0,)),)))
    assert reason(shown).isprintable()


@pytest.mark.parametrize(
    ("search", "expected"),
    [
        (SearchExtent(complete=True, unreadable=0), CLEAN),
        (SearchExtent(complete=False, unreadable=0), CANNOT_TELL),
        (SearchExtent(complete=True, unreadable=2), CANNOT_TELL),
    ],
)
@pytest.mark.parametrize("named", [("nvidia0",), None])
def test_a_search_without_an_end(search: SearchExtent, expected: int, named: tuple[str, ...] | None) -> None:
    """A GPU is clean only after all processes were searched for hidden holders."""
    question = SlurmQuestion(named, "", CheckTolerance())
    empty = snapshot(device(hidden=()))
    results = check_job_devices(empty, question, NodeJobs(), lambda _: (), search)
    assert overall_status(results) == expected
