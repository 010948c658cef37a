"""Slurm's numbers, daemons and jobs, and the verdict for a job in one line."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.builders import GIB, device, failed, holding, snapshot
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Snapshot, State
from vramledger.readers.hosts.host import Host
from vramledger.slurm.command import SlurmQuestion, check_job_devices, reason_line
from vramledger.slurm.jobs import JobRecord, NodeJobs, running_steps, step_daemons
from vramledger.slurm.names import devices_of, parse_capabilities, parse_gres
from vramledger.verdicts.cleanliness import (
    CANNOT_TELL,
    CLEAN,
    NOT_CLEAN,
    CheckTolerance,
    SearchExtent,
    overall_status,
)

DOCKER = f"0::/system.slice/docker-{'a5' * 32}.scope"
PODMAN = f"0::/user.slice/user-7.slice/user@7.service/libpod-{'a5' * 32}.scope"


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
        ({"7"}, ("nvidia0",), "", CLEAN), ({"7"}, None, "", CLEAN), ({"7"}, ("nvidia1",), "", NOT_CLEAN),
        (set(), ("nvidia0",), "", NOT_CLEAN), ({"7"}, ("nvidia0",), "7", NOT_CLEAN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("state", [State.ACTIVE, State.IDLE, State.ZOMBIE, State.ORPHANED, State.STOPPED])
def test_a_holder_of_a_job(
    running: set[str], record: tuple[str, ...] | None, ended: str, expected: int, state: State
) -> None:
    """In any state it is not a leftover while its job runs, on a GPU that the job has, as far as is known."""
    records = {"7": JobRecord("7", devices=record)} if record is not None else {}
    held = device(holdings=[holding(41, 20 * GIB, state)])
    assert status(held, NodeJobs(dict.fromkeys(running, 1), records), {41: "7"}, ended=ended) == expected


def test_who_is_of_a_running_job() -> None:
    """A SLUID may be of any; the dead are of none; hidden programs may be; a missing GPU is not judged."""
    held = device(holdings=[holding(41, 20 * GIB)])
    owners = {41: "s7KXM81KTA2V00"}
    assert status(held, NodeJobs({"7": 1}), owners) == CLEAN
    assert status(held, NodeJobs(), owners) == NOT_CLEAN
    assert NodeJobs(records={"7": JobRecord("7", "s7KXM81KTA2V00")}).number("s7KXM81KTA2V00") == "7"
    held = device(holdings=[holding(41, GIB), holding(42, GIB, State.DEAD)])
    assert status(held, NodeJobs({"7": 1}), {41: "7"}) == NOT_CLEAN
    held = device(holdings=[holding(41, GIB)], unattributed=8 * GIB)
    assert status(held, NodeJobs({"7": 1}), {41: "7"}) == CLEAN, "they may be the running job's"
    assert status(device(), NodeJobs(), {}, name="nvidia5") == CANNOT_TELL
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
    """What is not known is marked, a clean node has none, and a program's name stays in one line."""
    assert reason(failed()).startswith("vram? ")
    assert reason(snapshot(device())) == ""
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
    results = check_job_devices(snapshot(device(hidden=())), question, NodeJobs(), lambda _: (), search)
    assert overall_status(results) == expected


@pytest.mark.parametrize(
    ("uids", "cgroup", "counts"),
    [
        ("0 0 0 0\nNSpid: 42 1", "0::/buildah-7", False),
        ("0 0 0 0\nNSpid: 42", "0::/", True),
        ("0 0 0 0", "0::/system.slice/slurmstepd.scope/job_7/step_0/slurm", True),
        ("0 0 0 0", "0::/", True),
        ("1000 0 0 0", "0::/user.slice/user-1000.slice/session-5.scope", False),
        ("0 0 0 0", f"{DOCKER}/system.slice/slurmstepd.scope/job_7/step_0/slurm", False),
        ("0 0 0 0", PODMAN, False),
        ("1000 1000 1000 1000", "0::/", False),
    ],
    ids=[
        "a container's root that no name tells", "the host's root", "slurm", "without cgroups",
        "a setuid program", "a container's root", "rootless", "a user",
    ],
)  # fmt: skip
def test_only_the_hosts_root_runs_daemons(tmp_path: Path, uids: str, cgroup: str, counts: bool) -> None:
    """Name and title are the program's own: who is not the host's root makes no job run."""
    (tmp_path / "stat").write_text("btime 1\n")
    home = tmp_path / "42"
    home.mkdir()
    (home / "comm").write_text("slurmstepd\n")
    (home / "cmdline").write_bytes(b"slurmstepd: [7.0]\0")
    (home / "status").write_text(f"Uid: {uids}\n")
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "status").write_text("NSpid: 7\n")
    (home / "cgroup").write_text(cgroup + "\n")
    host = Host(tmp_path)
    assert list(step_daemons(host)) == ([(42, "7", "0")] if counts else [])
    assert (running_steps(host) is not None) == counts


MIG_MINORS = "config 1\nmonitor 2\ngpu0/gi1/access 12\ngpu0/gi1/ci0/access 13\ngpu1/gi2/access 30\n"

SLURMD_22 = """\
slurmd: Gres Name=shard Type=(null) Count=4 Index=2 ID=1918986455 File=/dev/nvidia2 (null)
slurmd: Gres Name=mps Type=(null) Count=0 Index=2 ID=7565421 File=/dev/nvidia2 (null)
slurmd: Gres Name=gpu Type=(null) Count=1 Index=2 ID=7696487 File=/dev/nvidia2 (null)
slurmd: Gres Name=gpu Type=h200 Count=1 Index=0 ID=7696487 File=/dev/nvidia0 (null)
"""
SLURMD_26 = """\
[2026-11-22T11:41:04.230] Node configuration differs from hardware: CPUs=16:2(hw)
[2026-11-22T11:41:04.230] Gres Name=gpu Type=(null) Count=1 Index=3 ID=7 File=/dev/nvidia3 Links=(null)
"""


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        (SLURMD_22, ("nvidia2", "nvidia0")),
        (SLURMD_26, ("nvidia3",)),
        ("Name=gpu File=/dev/nvidia[0-1,3],/dev/nvidia10", ("nvidia0", "nvidia1", "nvidia3", "nvidia10")),
        ("AutoDetect=off\nname=GPU file=/dev/nvidia4 # the first\n#Name=gpu File=/dev/nvidia5", ("nvidia4",)),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nNodeName=b Name=gpu File=/dev/nvidia0", ("nvidia0",)),
        ("Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap12,/dev/nvidia-caps/nvidia-cap13",
         ("nvidia0/gi1/ci0",)),
        ("Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap30", ("nvidia1/gi2",)),
        ("Name=gpu MultipleFiles=/dev/nvidia1,/dev/nvidia-caps/nvidia-cap99", None),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nNodeName=b Name=gpu File=/dev/nvidia1", None),
        ("NodeName=a Name=gpu File=/dev/nvidia0\nName=gpu File=/dev/nvidia0", None),
        ("AutoDetect=nvml", None),
        ("AutoDetect=nvml\nName=gpu Type=h200 File=/dev/nvidia0", None),
        ("Include other.conf\nName=gpu File=/dev/nvidia0", None),
        ("Name=gpu Count=4", None),
        ("Name=gpu Count=4 File=(null)", None),
        ("Name=gpu File=/dev/nvidia[0-999999999]", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_devices_of_slurms_numbers(text: str, devices: tuple[str, ...] | None) -> None:
    """The order of the lines is the order of the numbers; what the text does not say is not guessed."""
    assert parse_gres(text, parse_capabilities(MIG_MINORS)) == devices


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0", ("nvidia2",)), ("1,0", ("nvidia3", "nvidia2")), ("0-1", ("nvidia2", "nvidia3")),
        ("GPU-1-2,MIG-3", ("GPU-1-2", "MIG-3")), ("2", None), ("1-0", None), ("0,", None), ("٣", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_devices_of_a_job(written: str, devices: tuple[str, ...] | None) -> None:
    """If one number of a job is not known, its devices are not known."""
    assert devices_of(written, ("nvidia2", "nvidia3")) == devices


@given(st.text(alphabet="Namegpu File=/dev/nvidia[0123456789-,]\n#()", max_size=300))
def test_any_text_gives_devices_or_none(text: str) -> None:
    """Whatever is in the file, a result has device names only, and not more than a node can have."""
    found = parse_gres(text)
    assert found is None or 0 < len(found) <= 1024
