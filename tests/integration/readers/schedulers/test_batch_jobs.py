"""Slurm's jobs and Nomad's tasks: real processes with the variables that the schedulers set.

The cgroups are directories of a tree of ours, named as the kernel's are; whose process is in them is real.
"""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.players.stage import Stage
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import Grant, Scheduler
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.schedulers import reader as batch_jobs
from vramledger.readers.schedulers.reader import READ_INTERVAL, SchedulerReader
from vramledger.slurm.names import devices_of

SCOPE = "system.slice/slurmstepd.scope"
ALLOC = "5b3b6f0e-1c2d-4e5f-8a9b-0c1d2e3f4a5b"
GPU = "GPU-11111111-2222-3333-4444-555555555555"

Start = Callable[..., int]


def join_cgroup(root: Path, cgroup: str, *pids: int) -> None:
    """Add processes to a cgroup; as in a kernel, this and every cgroup above it has its files."""
    place = root / "sys/fs/cgroup" / cgroup
    place.mkdir(parents=True, exist_ok=True)
    for each in (place, *place.relative_to(root / "sys/fs/cgroup").parents):
        directory = root / "sys/fs/cgroup" / each
        (directory / "cgroup.controllers").write_text("memory\n")
        (directory / "cgroup.procs").touch()
    with (place / "cgroup.procs").open("a") as procs:
        procs.writelines(f"{pid}\n" for pid in pids)


@pytest.fixture
def start(tmp_path: Path, stage: Stage) -> Start:
    """Start processes with variables of their own alone in cgroups below a root; return their pids."""

    def one(cgroup: str, **variables: str) -> int:
        own = {"PATH": os.environ["PATH"], "AWS_SECRET_ACCESS_KEY": "hidden", **variables}
        pid = stage.start(wrapper=["env", "-i", *(f"{name}={value}" for name, value in own.items())]).pid
        join_cgroup(tmp_path, cgroup, pid)
        return pid

    return one


def claim(job: str, *devices: str) -> Grant:
    return Grant("slurm", job, devices, claimed=True)


GPUS = tuple(f"nvidia{number}" for number in range(8))


def configure(root: Path, text: str = "Name=gpu File=/dev/nvidia[0-7]\n") -> None:
    """Write gres.conf, which says what Slurm's numbers are."""
    (root / "etc/slurm").mkdir(parents=True)
    (root / "etc/slurm/gres.conf").write_text(text)


Read = Callable[[HostFiles, batch_jobs.Environment], Scheduler | None]


def read(root: Path, which: Read = batch_jobs.read_slurm) -> Scheduler | None:
    """Read one scheduler below a root, with the environments of the real processes."""
    host = Host(Path("/proc"))
    return which(HostFiles(root), lambda _, pid: host.variables(pid, batch_jobs.VARIABLES))


def test_jobs_and_their_gpus(start: Start, tmp_path: Path) -> None:
    """A job has the devices of its batch script and of its steps; one without GPUs has no reservation."""
    configure(tmp_path)
    start(f"{SCOPE}/job_41/step_batch/user/task_0", SLURM_JOB_GPUS="0,2-3", CUDA_VISIBLE_DEVICES="0,1,2")
    start(f"{SCOPE}/job_42/step_0/user/task_0", SLURM_STEP_GPUS="1", CUDA_VISIBLE_DEVICES="0")
    start(f"{SCOPE}/job_42/step_0/user/task_1", SLURM_STEP_GPUS="4", CUDA_VISIBLE_DEVICES="0")
    start(f"{SCOPE}/job_43/step_batch/user/task_0", CUDA_VISIBLE_DEVICES="0", GPU_DEVICE_ORDINAL="0")
    first = claim("41", "nvidia0", "nvidia2", "nvidia3")
    second = claim("42", "nvidia1", "nvidia4")
    assert read(tmp_path, batch_jobs.read_slurm) == Scheduler("slurm", GPUS, (first, second))


def test_jobs_in_the_first_version_of_cgroups(start: Start, tmp_path: Path) -> None:
    """Slurm's own hierarchy of cgroup version 1 is read as well."""
    start("freezer/slurm_n1/uid_1000/job_7/step_0/task_0", SLURM_STEP_GPUS="MIG-aaaa-bb")
    start("freezer/slurm/uid_1000/job_8/step_0/task_0", SLURM_STEP_GPUS="MIG-cccc-dd")
    grants = (claim("7", "MIG-aaaa-bb"), claim("8", "MIG-cccc-dd"))
    assert read(tmp_path, batch_jobs.read_slurm) == Scheduler("slurm", (), grants)


def test_slurms_number_is_a_position_in_gres_conf(start: Start, tmp_path: Path) -> None:
    """With ``File=/dev/nvidia[2-3]`` Slurm's number 0 is ``/dev/nvidia2``, and Slurm manages no other GPU."""
    configure(tmp_path, "NodeName=n[1-4] Name=gpu Type=h200 File=/dev/nvidia[2-3]\n")
    start(f"{SCOPE}/job_41/step_batch/user/task_0", SLURM_JOB_GPUS="0")
    assert read(tmp_path, batch_jobs.read_slurm) == Scheduler(
        "slurm", ("nvidia2", "nvidia3"), (claim("41", "nvidia2"),)
    )


@pytest.mark.parametrize("text", ["AutoDetect=nvml\n", "Name=gpu File=/dev/nvidia0\n"])
def test_a_number_that_cannot_be_mapped(start: Start, tmp_path: Path, text: str) -> None:
    """A GPU that the configuration does not name gives no reservation, and the result is incomplete."""
    configure(tmp_path, text)
    start(f"{SCOPE}/job_41/step_batch/user/task_0", SLURM_JOB_GPUS="1")
    found = sure(read(tmp_path))
    assert (found.grants, found.complete) == ((), False)


def test_what_the_prolog_has_recorded(start: Start, tmp_path: Path) -> None:
    """A job has the devices, user and account of its record, whatever its processes say, by number."""
    configure(tmp_path)
    records = tmp_path / "run/vramledger-slurm/jobs/n1"
    records.mkdir(parents=True)
    sluid = "s7KXM81KTA2V00"
    jobs = {41: ["nvidia5"], 44: ["nvidia1/gi2"], 45: [], 46: None, 49: ["nvidia6"]}
    who = {"uid": 1, "user": "ada", "account": "physics"}
    for job, devices in jobs.items():
        told = {"job": str(job), "sluid": sluid if job == 49 else "", "devices": devices}
        (records / str(job)).write_text(json.dumps(told | who))
    (records / ".47.123").write_text("{")
    (records / "48").write_text("{")
    start(f"{SCOPE}/job_41/step_batch/user/task_0", SLURM_JOB_GPUS="0,1,2")
    start(f"{SCOPE}/job_45/step_extern/user/task_0", SLURM_JOB_GPUS="3")
    start(f"{SCOPE}/{sluid}/step_batch/user/task_0", SLURM_JOB_GPUS="3")
    assert sure(read(tmp_path)).grants == tuple(
        Grant("slurm", job, (device,), user="ada", account="physics")
        for job, device in (("41", "nvidia5"), ("44", "nvidia1/gi2"), ("49", "nvidia6"))
    )


@pytest.mark.parametrize(
    ("name", "text", "managed"),
    [
        ("gres.conf", "# Name=gpu\nName=gpu Type=h200 File=/dev/nvidia[0-1]\n", ("nvidia0", "nvidia1")),
        ("gres.conf", "NodeName=n[1-9] Name=gpu File=/dev/nvidia0\n", ("nvidia0",)),
        ("gres.conf", "\n".join(f"NodeName=n{n} Name=gpu File=/dev/nvidia{n}" for n in (1, 2)), ("*",)),
        ("gres.conf", "AutoDetect=nvml\n", ("*",)),
        ("slurm.conf", "GresTypes=license,gpu\n", ("*",)),
        ("gres.conf", "# Name=gpu\nName=license Count=2\n", ()),
        ("slurm.conf", "GresTypes=license\n", ()),
    ],
)
def test_a_node_between_two_jobs(tmp_path: Path, name: str, text: str, managed: tuple[str, ...]) -> None:
    """Without a job, the configuration says whether Slurm assigns GPUs here."""
    (tmp_path / "etc/slurm").mkdir(parents=True)
    (tmp_path / "etc/slurm" / name).write_text(text)
    assert read(tmp_path) is None
    (tmp_path / "sys/fs/cgroup" / SCOPE / "system").mkdir(parents=True)
    assert read(tmp_path) == Scheduler("slurm", managed, ())


def test_tasks_of_nomad(start: Start, tmp_path: Path) -> None:
    """Tasks of Nomad's own driver and of Docker's have the devices that Nomad assigned."""
    names = {"NOMAD_ALLOC_ID": ALLOC, "NOMAD_JOB_NAME": "train", "NOMAD_TASK_NAME": "worker"}
    own, docker = f"{ALLOC}.worker.scope", f"docker-{'a' * 64}.scope"
    start(f"nomad.slice/share.slice/{own}", NVIDIA_VISIBLE_DEVICES=GPU, **names)
    start(f"nomad.slice/reserve.slice/{docker}", NVIDIA_VISIBLE_DEVICES=f"{GPU},MIG-aa-bb", **names)
    start(f"nomad.slice/share.slice/{ALLOC}.web.scope", **names)
    start(f"nomad.slice/share.slice/{ALLOC}.all.scope", NVIDIA_VISIBLE_DEVICES="all", **names)
    found = sure(read(tmp_path, batch_jobs.read_nomad))
    name, share = "train/worker/5b3b6f0e", f"/nomad.slice/share.slice/{own}"
    assert set(found.grants) == {
        Grant("nomad", name, (GPU,), share, claimed=True),
        Grant("nomad", name, (GPU, "MIG-aa-bb"), f"/nomad.slice/reserve.slice/{docker}", claimed=True),
    }
    assert found.complete


@pytest.mark.parametrize(
    "cgroup", [f"nomad.slice/share.slice/{ALLOC}.web.scope", f"freezer/nomad/{ALLOC}.web"]
)
def test_a_task_of_nomad_takes_no_name_of_another(start: Start, tmp_path: Path, cgroup: str) -> None:
    """Allocation and task are those of the cgroup, and a job of another allocation is not named."""
    names = {"NOMAD_ALLOC_ID": "deadbeef", "NOMAD_JOB_NAME": "victim", "NOMAD_TASK_NAME": "serve"}
    start(cgroup, NVIDIA_VISIBLE_DEVICES=GPU, **names)
    assert [each.name for each in sure(read(tmp_path, batch_jobs.read_nomad)).grants] == ["web/5b3b6f0e"]


def test_an_environment_that_may_not_be_read(start: Start, tmp_path: Path) -> None:
    """If a job's variables are not readable, its scheduler's result is marked as incomplete."""
    start(f"{SCOPE}/job_41/step_0/user/task_0", SLURM_STEP_GPUS="0")
    found = batch_jobs.read_slurm(HostFiles(tmp_path), lambda _, pid: None)  # noqa: ARG005 as the reader calls it
    assert found == Scheduler("slurm", (), (), complete=False)


def test_nothing_else_of_an_environment_is_kept(start: Start) -> None:
    """Of an environment only the named variables are read, and at most 4 KiB of each."""
    pid = start("x", SLURM_JOB_GPUS="1" * 10_000, NOMAD_ALLOC_ID="a")
    kept = {"SLURM_JOB_GPUS": "1" * 4096, "NOMAD_ALLOC_ID": "a"}
    assert Host(Path("/proc")).variables(pid, batch_jobs.VARIABLES) == kept


@given(st.text(max_size=200))
def test_any_value_gives_devices_or_none(told: str) -> None:
    """A job's variable gives at most as many devices as can be named."""
    for device in devices_of(told, GPUS) or ():
        assert device.startswith(("nvidia", "GPU-", "MIG-"))
        assert device.isprintable()


class Turns:
    """A reader of the schedulers below a root, and its clock, which only the test moves."""

    def __init__(self, root: Path) -> None:
        configure(root)
        self.now = 1000.0
        self.reader = SchedulerReader(Host(Path("/proc")), root, clock=lambda: self.now)

    def read(self, after: float = 0.0) -> list[tuple[Grant, ...]]:
        """Return what each scheduler has granted."""
        self.now += after
        return [each.grants for each in self.reader.read_schedulers()]


def test_a_job_that_is_read_before_its_exec(tmp_path: Path, stage: Stage) -> None:
    """A process has its job's variables from its exec on: a read before that is not remembered for ever."""
    forked = stage.run(["/bin/sh", "-c", "read go; SLURM_STEP_GPUS=3 exec sleep 600"], stdin=subprocess.PIPE)
    join_cgroup(tmp_path, f"{SCOPE}/job_41/step_0/user/task_0", forked.pid)
    turns, grant = Turns(tmp_path), claim("41", "nvidia3")
    assert not any(turns.read())
    sure(forked.popen.stdin).write(b"go\n")
    sure(forked.popen.stdin).flush()
    wait_until(lambda: turns.read(READ_INTERVAL) == [(grant,)], "a read after the exec")


def test_a_job_read_within_its_exec(tmp_path: Path, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel has a new program before its variables: a read in between is not remembered for ever."""
    job = stage.run(["sleep", "600"], env={"SLURM_STEP_GPUS": "3", "PATH": "/usr/bin:/bin"})
    join_cgroup(tmp_path, f"{SCOPE}/job_41/step_0/user/task_0", job.pid)
    turns = Turns(tmp_path)
    with monkeypatch.context() as within:
        within.setattr(Host, "variables", lambda *_: {})
        assert not any(turns.read())
    wait_until(lambda: any(turns.read(READ_INTERVAL)), "a read after the exec")


def test_a_read_says_when_it_began(start: Start, tmp_path: Path) -> None:
    """The time belongs to the read whose result is returned, and not to one that is under way."""
    start(f"{SCOPE}/job_41/step_0/user/task_0", SLURM_STEP_GPUS="0")
    turns = Turns(tmp_path)
    begun, times = turns.now, [turns.reader.read_at]
    for after in (0.0, READ_INTERVAL / 2):
        assert turns.read(after)
        times.append(turns.reader.read_at)
    assert times == [None, begun, begun]


def test_the_process_that_says_it_may_be_any_of_a_job(start: Start, tmp_path: Path) -> None:
    """Processes without the variables, and cgroups that the job made below its own, hide no reservation."""
    configure(tmp_path)
    task = f"{SCOPE}/job_41/step_0/user/task_0"
    for _ in range(4):
        start(task)
    start(f"{task}/container/payload", SLURM_STEP_GPUS="2")
    assert sure(read(tmp_path)).grants == (claim("41", "nvidia2"),)


def test_the_unread_may_be_reserved(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of processes, cgroups or an environment that is cut short is said to be incomplete."""
    task = f"{SCOPE}/job_41/step_0/user/task_0"
    pid = start(task)
    start(task)

    def complete() -> bool:
        return sure(read(tmp_path)).complete

    assert complete()
    for name in ("MAX_PROCESSES", "MAX_CGROUPS"):
        with monkeypatch.context() as patch:
            patch.setattr(batch_jobs, name, 1)
            assert not complete()
    with monkeypatch.context() as patch:
        patch.setattr("vramledger.readers.hosts.facts.ENVIRON_CAP", 16)
        assert Host(Path("/proc")).variables(pid, batch_jobs.VARIABLES) is None
        assert not complete()
    procs = tmp_path / "sys/fs/cgroup" / task / "cgroup.procs"
    procs.unlink()
    procs.mkdir()  # a read that fails, as of a threaded cgroup
    assert not complete()


def test_the_pace_and_what_is_remembered(start: Start, tmp_path: Path) -> None:
    """One read in each interval; a scheduler whose last job has ended still manages what it assigned."""
    record = tmp_path / "run/vramledger-slurm/jobs/n1/41"
    record.parent.mkdir(parents=True)
    record.write_text('{"job": "41", "devices": ["nvidia5"]}')
    start(f"{SCOPE}/job_42/step_0/user/task_0", SLURM_STEP_GPUS=GPU)
    turns = Turns(tmp_path)
    (tmp_path / "etc/slurm/gres.conf").unlink()
    (first,) = turns.reader.read_schedulers()
    record.unlink()
    both, managed = (Grant("slurm", "41", ("nvidia5",)), claim("42", GPU)), ("*", "nvidia5")
    assert first == Scheduler("slurm", managed, both)
    assert turns.reader.read_schedulers() == (first,)  # the interval has not passed
    turns.now += READ_INTERVAL
    ended = (Scheduler("slurm", managed, both[1:]),)
    wait_until(lambda: turns.reader.read_schedulers() == ended, "a look without the job")
