"""Prolog, epilog and health check, run as slurmd runs them, on the stand-in driver and a stand-in Slurm.

``test_real_slurm.py`` runs them under the real daemons.
"""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.readers.owners.test_owners_real import cgroup
from tests.support.players.listed import listed_while_alive
from tests.support.players.stage import Stage
from tests.support.podman import busybox_image, container
from tests.support.requirements import require_host_pid_namespace, require_root, require_tool
from tests.support.slurm.daemons import step_daemon
from tests.support.standin.library import GIB, Code, StandIn

ROOT = Path(__file__).resolve().parents[3]
JOB = 900_000_000 + os.getpid()
"""A job that no cluster has, and no other run of the tests."""
SCRIPTS = ROOT / "deploy" / "slurm"
NOBODY = 2**22
"""One above the largest pid of Linux: NVML lists it and the host does not have it, as after a crash."""

SCONTROL = """\
#!/bin/bash
cd {here}
echo "$*" >>calls
[ ! -e broken ] || exit 1
case $* in
*'show node'*) echo "NodeName=gpu01 Arch=x86_64 State=$(cat state) ThreadsPerCore=1 $(cat reason)" ;;
*State=RESUME*) echo IDLE >state; : >reason ;;
*State=DRAIN*)
    words=$*
    echo IDLE+DRAIN >state
    echo "Reason=${{words#*Reason=}} [root@2026-11-22T10:00:00]" >reason ;;
esac
"""
"""It has slurmctld's words of Slurm 22.05 and 26.05."""

SLURMD = """\
#!/bin/sh
cat {here}/gres
"""


class Node:
    """A node of Slurm whose ``scontrol`` has a state and a reason, and records its calls."""

    def __init__(self, here: Path, standin: StandIn) -> None:
        self._here = here
        self._standin = standin
        (here / "vramledger").mkdir()
        (here / "bin").mkdir()
        for script in SCRIPTS.glob("*.sh"):
            shutil.copy2(script, here / "vramledger")
        environment = " ".join(f"{name}={value}" for name, value in standin.env().items())
        for name, text in {
            "scontrol": SCONTROL.format(here=here),
            "slurmd": SLURMD.format(here=here),
            "vramledger": "#!/bin/sh\n"
            f"export {environment} PYTHONPATH={ROOT / 'exporter'}\n"
            f'exec {sys.executable} -m vramledger "$@"\n',
        }.items():
            (here / "bin" / name).write_text(text, encoding="utf-8")
            (here / "bin" / name).chmod(0o755)
        self.set_gres("Gres Name=gpu Type=(null) Count=1 Index=0 ID=7696487 File=/dev/nvidia[0-1] (null)")
        self.set_state("IDLE", "")
        self.configure()

    def configure(self, *lines: str) -> None:
        """Write the settings; the wait is short unless they say otherwise."""
        here = self._here
        own = [f"SLURM_BIN={here}/bin", f"VRAMLEDGER={here}/bin/vramledger", "WAIT=20", "SETTLE=1", "GRACE=1"]
        own += [f"RUN={here}/run", f"STATE={here}/state.d", f'FLAGS=("--records={here}/run")']
        (here / "vramledger.conf").write_text("\n".join([*own, *lines]) + "\n", encoding="utf-8")

    def set_gres(self, text: str) -> None:
        """Make this the answer of ``slurmd -G``."""
        (self._here / "gres").write_text(text + "\n", encoding="utf-8")

    def set_state(self, state: str, reason: str, by: str = "root") -> None:
        """Make this the node's state, as slurmctld has it."""
        (self._here / "state").write_text(state + "\n", encoding="utf-8")
        text = f"Reason={reason} [{by}@2026-11-22T09:00:00]\n" if reason else ""
        (self._here / "reason").write_text(text, encoding="utf-8")

    @property
    def state(self) -> str:
        return (self._here / "state").read_text(encoding="utf-8").strip()

    @property
    def reason(self) -> str:
        """Return why the node is drained, without who and when; empty when it is not."""
        text = (self._here / "reason").read_text(encoding="utf-8").strip()
        return text.removeprefix("Reason=").rpartition(" [")[0]

    @property
    def updates(self) -> list[str]:
        path = self._here / "calls"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [line for line in lines if line.startswith("update")]

    def record(self, job: int, *devices: str, uid: int = 0) -> None:
        """Record a job, as its prolog has done."""
        path = self._here / "run" / "jobs" / "gpu01" / str(job)
        path.parent.mkdir(parents=True, exist_ok=True)
        raw = {"job": str(job), "sluid": "", "uid": uid, "user": "", "account": "", "devices": devices}
        path.write_text(json.dumps(raw), encoding="utf-8")

    @property
    def records(self) -> list[str]:
        return sorted(path.name for path in (self._here / "run" / "jobs").glob("*/*"))

    def run(self, script: str, *, job: int = 4711, **environment: str) -> int:
        """Run one of the scripts as slurmd does, and return its exit status."""
        given = {"SLURMD_NODENAME": "gpu01", "SLURM_JOB_ID": str(job), **environment}
        path = self._here / "vramledger" / script
        return subprocess.run([path], env=given, check=False, timeout=60).returncode


@pytest.fixture
def node(standin: StandIn, tmp_path: Path) -> Node:
    """Return a node with two idle GPUs."""
    require_host_pid_namespace()
    require_tool("bash")
    standin.device_count = 2
    return Node(tmp_path, standin)


def test_a_job_gets_clean_gpus(node: Node, standin: StandIn) -> None:
    """A job on clean GPUs starts, even with leftovers on other GPUs; so does a job without GPUs."""
    standin.device(0).set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="1") == 0
    assert node.run("prolog.sh") == 0
    assert node.updates == []


@pytest.mark.thorough
def test_slurms_numbers_follow_gres_conf(node: Node, standin: StandIn) -> None:
    """Slurm's number 0 is the first file of gres.conf: neither NVML's index 0 nor /dev/nvidia0."""
    node.set_gres("Gres Name=gpu Type=(null) Count=1 Index=1 ID=7696487 File=/dev/nvidia1 (null)")
    standin.device(0).set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 0
    for index in (0, 1):
        standin.device(index).set(minor=1 - index)
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 1


@pytest.mark.thorough
def test_numbers_that_are_not_known_blame_only_what_slurm_manages(node: Node, standin: StandIn) -> None:
    """Where a number cannot be mapped, every GPU of gres.conf is judged, and no other one."""
    node.set_gres("Gres Name=gpu Type=(null) Count=1 Index=1 ID=7696487 File=/dev/nvidia1 (null)")
    standin.device(0).set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="7") == 0
    standin.device(1).set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="7") == 1


@pytest.mark.thorough
def test_a_mig_job_is_judged_on_its_instance(node: Node, standin: StandIn) -> None:
    """The UUIDs that slurmd gives are the job's instances: a leftover on another one is not its own."""
    first, second = standin.device(0).divide("3g.71gb", "3g.71gb")
    first.set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="1", CUDA_VISIBLE_DEVICES=second.uuid) == 0
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0", CUDA_VISIBLE_DEVICES=first.uuid) == 1
    assert node.reason.startswith("vram GPU0")


@pytest.mark.thorough
def test_a_driver_that_is_slow_once_drains_nothing(node: Node, standin: StandIn) -> None:
    """The driver is asked until the wait is over: one slow sample does not count."""
    standin.latency("nvmlInitWithFlags", 1_500_000)
    standin.latency("nvmlDeviceGetMemoryInfo_v2", 1_200_000)
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 0
    assert node.updates == []


def test_a_hang_ends_in_time(node: Node, standin: StandIn) -> None:
    """A driver that hangs gives an answer when the wait is over, and no later than slurmd waits."""
    node.configure("WAIT=2")
    standin.hang("nvmlInitWithFlags")
    try:
        assert node.run("health.sh") == 0
    finally:
        standin.release()
    assert node.reason.startswith("vram? ")


@pytest.mark.thorough
def test_a_prolog_that_cannot_drain_fails(node: Node, standin: StandIn, tmp_path: Path) -> None:
    """If slurmctld does not answer, prolog and epilog fail, so that slurmd keeps the next job away."""
    standin.device(0).set_processes([(NOBODY, GIB)])
    (tmp_path / "broken").touch()
    for script in ("prolog.sh", "epilog.sh"):
        assert node.run(script, SLURM_JOB_GPUS="0") == 1


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("script", "state"),
    [
        ("prolog.sh", "IDLE+DRAIN"), ("epilog.sh", "MIXED+DRAIN"), ("health.sh", "IDLE+DRAIN"),
        ("health.sh", "DOWN"), ("health.sh", "DOWN+DRAIN"), ("health.sh", "IDLE+MAINT"),
    ],
)  # fmt: skip
def test_what_people_have_set_stays(node: Node, standin: StandIn, script: str, state: str) -> None:
    """A node that is drained or down is not touched, whatever is found and whatever is found later."""
    standin.driver_error = Code.DRIVER_NOT_LOADED
    node.configure("WAIT=1")
    node.set_state(state, "HW ticket 4711")
    node.run(script, SLURM_JOB_GPUS="0")
    standin.driver_error = 0
    node.run("health.sh")
    assert (node.state, node.reason, node.updates) == (state, "HW ticket 4711", [])


def test_a_leftover_drains_once_and_is_not_resumed(node: Node, standin: StandIn) -> None:
    """The epilog of a failed prolog keeps its reason; when the memory is free a person looks first.

    The first 20 characters of the reason, all that sinfo shows, name the GPU, who and how much.
    """
    standin.device(1).set_processes([(NOBODY, 20 * GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0,1") == 1
    before = node.reason
    assert before[:20] == "vram GPU1 dead 20GiB"
    assert before.endswith(standin.device(1).uuid)
    assert node.run("epilog.sh", SLURM_JOB_GPUS="0,1") == 0
    standin.device(1).set_processes([])
    assert node.run("health.sh") == 0
    assert (node.state, node.reason, len(node.updates)) == ("IDLE+DRAIN", before, 1)


@pytest.mark.repeats
@pytest.mark.parametrize("script", ["prolog.sh", "epilog.sh", "health.sh"])
def test_our_own_doubt_is_undone(node: Node, standin: StandIn, script: str) -> None:
    """A node that was drained because the driver did not answer is resumed when it answers again."""
    node.configure("WAIT=1")
    standin.driver_error = Code.DRIVER_NOT_LOADED
    assert node.run(script, SLURM_JOB_GPUS="0") == (script == "prolog.sh")
    assert node.run("health.sh") == 0
    assert (node.state, node.reason[:6]) == ("IDLE+DRAIN", "vram? ")
    standin.driver_error = 0
    node.configure()
    assert node.run("health.sh") == 0
    assert node.run("health.sh") == 0
    assert [call.split()[2] for call in node.updates] == ["State=DRAIN", "State=RESUME"]


@pytest.mark.repeats(kept=2)
@pytest.mark.parametrize(
    ("state", "suffix", "by"),
    [
        ("IDLE+DRAIN", "; HW ticket 4711", "root"),
        ("IDLE+DRAIN", "", "alice"),
        ("DOWN+DRAIN", "", "root"),
        ("IDLE+DRAIN+MAINT", "", "root"),
    ],
)
def test_nothing_else_is_resumed(node: Node, standin: StandIn, state: str, suffix: str, by: str) -> None:
    """A node whose reason somebody has added to, or has replaced, or which is down by now, stays as it is."""
    node.configure("WAIT=1")
    standin.driver_error = Code.DRIVER_NOT_LOADED
    node.run("health.sh")
    standin.driver_error = 0
    node.configure()
    node.set_state(state, node.reason + suffix, by)
    node.run("health.sh")
    assert node.state == state


def test_a_health_check_drains_for_no_holder(node: Node, standin: StandIn, stage: Stage) -> None:
    """Jobs run while a node's health is checked: no holder makes a node unhealthy."""
    with listed_while_alive(standin, stage.start()):
        assert node.run("health.sh") == 0
    assert node.updates == []


@pytest.mark.thorough
def test_a_missing_vramledger_is_not_a_recovery(node: Node, standin: StandIn, tmp_path: Path) -> None:
    """A node that has lost vramledger is not resumed; a job that starts there drains it as unknown."""
    node.configure("WAIT=1")
    standin.driver_error = Code.DRIVER_NOT_LOADED
    node.run("health.sh")
    standin.driver_error = 0
    (tmp_path / "bin" / "vramledger").unlink()
    node.run("health.sh")
    assert node.state == "IDLE+DRAIN"
    node.set_state("IDLE", "")
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 1
    assert node.reason.startswith("vram? ")


@pytest.mark.parametrize("meanwhile", ["", "#!/bin/sh\necho ImportError: no module >&2\nexit 1\n"])
def test_an_upgrade_is_waited_for(node: Node, tmp_path: Path, meanwhile: str) -> None:
    """A job that starts while vramledger is being replaced waits for it, and its node stays."""
    program, away = tmp_path / "bin" / "vramledger", tmp_path / "bin" / "vramledger.new"
    program.rename(away)
    if meanwhile:
        program.write_text(meanwhile, encoding="utf-8")
        program.chmod(0o755)
    node.configure("WAIT=20")
    fetch = f"while [ ! -e {tmp_path}/run ]; do sleep 0.01; done; sleep 0.5; mv {away} {program}"
    mover = subprocess.Popen(["sh", "-c", fetch])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 0
    assert mover.wait() == 0
    assert node.updates == []


def install(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    require_root()
    return subprocess.run([SCRIPTS / "install.sh", *arguments], check=False, capture_output=True, text=True)


def test_an_installation_is_replaced_at_once(tmp_path: Path) -> None:
    """An update keeps the settings, and a hook that runs keeps its files until the update after the next."""
    target, settings = tmp_path / "vramledger", tmp_path / "vramledger.conf"
    install(target)
    first = target.resolve()
    settings.write_text("VRAMLEDGER=/nowhere/vramledger\n", encoding="utf-8")
    missing = "install.sh: there is no /nowhere/vramledger on this node: install it"
    assert install(target).stderr.startswith(missing)
    assert target.resolve() != first
    assert (first / "hook.sh").exists()
    assert settings.read_text(encoding="utf-8") == "VRAMLEDGER=/nowhere/vramledger\n"
    settings.write_text("VRAMLEDGER=/bin/true\n", encoding="utf-8")
    assert install(target).stderr == ""
    assert not first.exists()
    assert {path.name for path in target.iterdir()} == {"hook.sh", "prolog.sh", "epilog.sh", "health.sh"}


def test_an_installation_is_removed(tmp_path: Path) -> None:
    """Not while slurm.conf names the scripts, which would drain the node; the settings stay."""
    target, config = tmp_path / "vramledger", tmp_path / "slurm.conf"
    assert install(target).returncode == 0
    config.write_text(f"Prolog={target}/prolog.sh\n", encoding="utf-8")
    refused = install("--uninstall", target)
    assert (refused.returncode, target.exists(), "still names" in refused.stderr) == (1, True, True)
    config.write_text(f"#Prolog={target}/prolog.sh\n", encoding="utf-8")
    done = install("--uninstall", target)
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["slurm.conf", "vramledger.conf"]
    assert f"kept: {tmp_path}/vramledger.conf" in done.stdout


@pytest.mark.parametrize(
    ("settings", "status"), [(("NOT_CLEAN=warn",), 0), (("UNKNOWN=warn", "FLAGS+=(--owner=dead)"), 1)]
)
def test_policy_is_settings(node: Node, standin: StandIn, settings: tuple[str, ...], status: int) -> None:
    """With ``warn`` a prolog lets the job start and changes nothing; the other policy does not count."""
    node.configure(*settings)
    standin.device(0).set_processes([(NOBODY, GIB)])
    assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == status
    assert len(node.updates) == status


def test_a_job_is_recorded_while_it_runs(node: Node) -> None:
    """The prolog records the devices that slurmd has given to a job, and its epilog removes the record."""
    node.run("prolog.sh", SLURM_JOB_GPUS="1", SLURM_JOB_UID="0", SLURM_JOB_ACCOUNT="physics")
    assert node.records == ["4711"]
    node.run("epilog.sh", SLURM_JOB_GPUS="1")
    assert node.records == []


@pytest.mark.parametrize("stopped", [False, True])
def test_an_epilog_ends_the_jobs_rest(node: Node, standin: StandIn, stage: Stage, stopped: bool) -> None:
    """Whatever its job has left is ended, in any state; another job's process is not, and drains nothing."""
    require_root()
    node.configure("SETTLE=15")
    leftover, neighbour = stage.start(), stage.start()
    with (
        cgroup(f"slurm_gpu01/uid_0/job_{JOB}/step_batch") as place,
        cgroup(f"slurm_gpu01/uid_0/job_{JOB + 1}/step_batch") as other,
        listed_while_alive(standin, leftover, neighbour),
        step_daemon(JOB + 1),
    ):
        (place / "cgroup.procs").write_text(str(leftover.pid))
        (other / "cgroup.procs").write_text(str(neighbour.pid))
        if stopped:
            leftover.stop()
        status = node.run("epilog.sh", job=JOB, SLURM_JOB_GPUS="0")
        ended, spared = leftover.wait(), neighbour.running
    assert (status, ended, spared) == (0, -signal.SIGTERM, True)
    assert node.updates == []


def test_shared_gpus(node: Node, standin: StandIn, stage: Stage) -> None:
    """A holder of a running job that has the GPU too is not a leftover; it is one when the job has ended."""
    require_root()
    neighbour = stage.start()
    standin.device(0).set_memory(unattributed=0)
    with cgroup(f"slurm/uid_0/job_{JOB}/step_batch") as place, listed_while_alive(standin, neighbour):
        (place / "cgroup.procs").write_text(str(neighbour.pid))
        node.record(JOB, "nvidia0")
        with step_daemon(JOB):
            assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 0
        assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 1
        node.set_state("IDLE", "")
        node.record(JOB, "nvidia1")
        with step_daemon(JOB):
            assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 1, "its job has another GPU"


@pytest.mark.parametrize("above", ["user.slice/user-7.slice/user@7.service", "vramledger-lab.service/its"])
def test_a_name_below_makes_nobody_a_container(
    node: Node, standin: StandIn, stage: Stage, above: str
) -> None:
    """Who names a cgroup of the own manager or of a delegated unit like a container's is left over."""
    require_root()
    with step_daemon(JOB):
        leftover = stage.start()  # a container that is as young may be the job's
        with cgroup(f"{above}/docker-{'a5' * 32}.scope") as place, listed_while_alive(standin, leftover):
            os.chown(place.parent, 64031, 64031)
            (place / "cgroup.procs").write_text(str(leftover.pid))
            node.record(JOB, "nvidia0")
            assert node.run("prolog.sh", SLURM_JOB_GPUS="0") == 1


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with busybox_image(tmp_path_factory.mktemp("image")) as name:
        yield name


@dataclass(frozen=True)
class Contained:
    """The first process of a container."""

    pid: int

    def wait(self) -> None:
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(self.pid)], [], [])

    def end(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def test_a_container_of_a_running_job(node: Node, standin: StandIn, image: str) -> None:
    """A container may be a running job's on a GPU of that job; when the job has ended, it is left over."""
    node.record(JOB, "nvidia0")
    with step_daemon(JOB + 2), step_daemon(JOB), container(image) as (_, pid):
        standin.device(0).set_processes([(pid, 20 * GIB)])
        assert node.run("prolog.sh", job=JOB + 1, SLURM_JOB_GPUS="0") == 0
        assert (node.state, node.updates) == ("IDLE", [])
        node.record(JOB + 2, "nvidia1")
        assert node.run("epilog.sh", job=JOB, SLURM_JOB_GPUS="0") == 0
        assert node.reason.startswith("vram GPU0 root 20GiB")


@pytest.mark.thorough
def test_a_container_that_is_older_than_the_jobs(node: Node, standin: StandIn, image: str) -> None:
    """A container that was there before a running job began is not that job's."""
    node.record(JOB, "nvidia0")
    with container(image) as (_, pid), step_daemon(JOB):
        standin.device(0).set_processes([(pid, 20 * GIB)])
        assert node.run("prolog.sh", job=JOB + 1, SLURM_JOB_GPUS="0") == 1
        assert node.reason.startswith("vram GPU0 root 20GiB")


@pytest.mark.thorough
def test_a_container_that_names_its_job(node: Node, standin: StandIn, image: str) -> None:
    """A container with its job's number ends with this job, and with no other."""
    node.configure("SETTLE=10")  # the first process of a PID namespace ignores SIGTERM
    for number in (JOB, JOB + 1):
        node.record(number, "nvidia0", uid=64031)
    with (
        step_daemon(JOB + 1),
        container(image, SLURM_JOB_ID=JOB + 1) as (_, neighbour),
        container(image, SLURM_JOB_ID=JOB) as (_, pid),
        listed_while_alive(standin, Contained(pid), Contained(neighbour)),
    ):
        assert node.run("epilog.sh", job=JOB, SLURM_JOB_GPUS="0") == 0
        assert (Path(f"/proc/{pid}").exists(), Path(f"/proc/{neighbour}").exists()) == (False, True)
    assert (node.state, node.updates) == ("IDLE", [])
