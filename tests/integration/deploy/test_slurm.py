"""Prolog, epilog and health check, run as slurmd runs them, on the stand-in driver and a stand-in Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.readers.owners.test_owners_real import cgroup
from tests.support.players.listed import listed_while_alive
from tests.support.players.stage import Stage
from tests.support.requirements import require_host_pid_namespace, require_tool
from tests.support.standin.library import GIB, Code, StandIn

ROOT = Path(__file__).resolve().parents[3]
SLURM = ROOT / "deploy" / "slurm"
NOBODY = 2**22
"""One above the largest pid of Linux: NVML lists it and the host does not have it, as after a crash."""

SCONTROL = """\
#!/bin/sh
printf '%s\\n' "$*" >>"$SLURM_NOTES/calls"
case $* in
*State=RESUME*) echo none >"$SLURM_NOTES/reason" ;;
*) printf '%s\\n' "$*" | sed 's/.*Reason=//' >"$SLURM_NOTES/reason" ;;
esac
"""


class Slurm:
    """A node of Slurm whose ``scontrol`` records its calls, and whose ``sinfo`` reports them."""

    def __init__(self, notes: Path, standin: StandIn) -> None:
        self._notes = notes
        self._standin = standin
        self.reason = "none"
        for name, text in {
            "scontrol": SCONTROL,
            "sinfo": '#!/bin/sh\ncat "$SLURM_NOTES/reason"\n',
            "vramledger": f'#!/bin/sh\nexec {sys.executable} -m vramledger "$@"\n',
        }.items():
            program = notes / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(text, encoding="ascii")
            program.chmod(0o755)

    @property
    def reason(self) -> str:
        """Return why the node is drained; ``none`` when it is not."""
        return (self._notes / "reason").read_text(encoding="utf-8").strip()

    @reason.setter
    def reason(self, value: str) -> None:
        (self._notes / "reason").write_text(value + "\n", encoding="utf-8")

    @property
    def calls(self) -> list[str]:
        """Return the calls of ``scontrol``."""
        path = self._notes / "calls"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def remove_vramledger(self) -> None:
        """Make the node one without vramledger."""
        (self._notes / "bin" / "vramledger").unlink()

    def run(self, script: str, **environment: str) -> int:
        """Run one of the scripts as slurmd does, and return its exit status."""
        given = {
            "PATH": f"{self._notes / 'bin'}:/usr/bin:/bin",
            "PYTHONPATH": f"{ROOT / 'exporter'}:{ROOT}",
            "SLURM_NOTES": str(self._notes),
            "SLURMD_NODENAME": "gpu01",
            "SLURM_JOB_ID": "4711",
            "VRAMLEDGER_WAIT": "100ms",
            **self._standin.env(),
            **environment,
        }
        return subprocess.run([SLURM / script], env=given, check=False, timeout=60).returncode


@pytest.fixture
def slurm(standin: StandIn, tmp_path: Path) -> Slurm:
    """Return a node with two idle GPUs."""
    require_host_pid_namespace()
    require_tool("bash")
    standin.device_count = 2
    return Slurm(tmp_path, standin)


def test_prolog_lets_a_job_have_clean_gpus(slurm: Slurm, standin: StandIn) -> None:
    """A job on clean GPUs starts, even with leftovers on other GPUs; so does a job without GPUs."""
    standin.device(0).set_processes([(NOBODY, GIB)])

    assert slurm.run("prolog.sh", SLURM_JOB_GPUS="1") == 0
    assert slurm.run("prolog.sh") == 0
    assert slurm.calls == []


def test_prolog_judges_the_gpu_of_the_device_file(slurm: Slurm, standin: StandIn) -> None:
    """Slurm's numbers are those of device files: where NVML counts otherwise, the job's own GPU is judged."""
    for index in (0, 1):
        standin.device(index).set(minor=1 - index)
    standin.device(0).set_processes([(NOBODY, GIB)])

    assert slurm.run("prolog.sh", SLURM_JOB_GPUS="0") == 0
    assert slurm.run("prolog.sh", SLURM_JOB_GPUS="1") == 1


@pytest.mark.parametrize("variable", ["SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES"])
def test_prolog_drains_a_node_with_leftovers(slurm: Slurm, standin: StandIn, variable: str) -> None:
    """A leftover on one of the job's GPUs drains the node with its holder, and the job does not start."""
    standin.device(1).set_processes([(NOBODY, GIB)])

    assert slurm.run("prolog.sh", **{variable: "0,1"}) == 1
    (call,) = slurm.calls
    assert call.startswith("update NodeName=gpu01 State=DRAIN Reason=GPU not clean: GPU 1 ")
    assert f"dead pid {NOBODY}" in call


def test_prolog_does_not_start_a_job_blindly(slurm: Slurm, standin: StandIn) -> None:
    """If it is not known whether a GPU is clean, the node is drained with that reason."""
    standin.driver_error = Code.DRIVER_NOT_LOADED

    assert slurm.run("prolog.sh", SLURM_JOB_GPUS="0") == 1
    assert slurm.reason.startswith("GPU unknown: ")
    assert "cannot tell" in slurm.reason


def test_epilog_ends_what_the_job_left(slurm: Slurm, standin: StandIn, stage: Stage) -> None:
    """A stopped process that the job left on its GPU is ended; another job's stopped process is not."""
    job = str(900_000_000 + os.getpid())
    leftover, neighbour = stage.start(), stage.start()
    with (
        cgroup(f"slurm/uid_0/job_{job}/step_batch") as place,
        listed_while_alive(standin, leftover, neighbour),
    ):
        (place / "cgroup.procs").write_text(str(leftover.pid))
        for each in (leftover, neighbour):
            each.stop()
        status = slurm.run("epilog.sh", SLURM_JOB_GPUS="0", SLURM_JOB_ID=job)
        ended, spared = leftover.wait(), neighbour.running

    assert (status, ended, spared) == (0, -signal.SIGTERM, True)
    assert slurm.calls == []


def test_epilog_drains_when_memory_does_not_come_back(slurm: Slurm, standin: StandIn) -> None:
    """Memory of a process that is gone drains the node; the reason names the job."""
    standin.device(0).set_processes([(NOBODY, GIB)])

    assert slurm.run("epilog.sh", SLURM_JOB_GPUS="0") == 0  # a failing epilog would drain with a worse reason
    assert slurm.reason.startswith("GPU not clean after job 4711: GPU 0 ")


def test_health_drains_once_and_resumes(slurm: Slurm, standin: StandIn) -> None:
    """A node without its driver is drained once, and resumed when the driver is back."""
    standin.driver_error = Code.DRIVER_NOT_LOADED
    assert [slurm.run("health.sh") for _ in range(2)] == [0, 0]
    assert slurm.reason.startswith("vramledger: ")

    standin.driver_error = 0
    assert [slurm.run("health.sh") for _ in range(2)] == [0, 0]
    assert [call.split()[2] for call in slurm.calls] == ["State=DRAIN", "State=RESUME"]


def test_health_leaves_what_others_drained(slurm: Slurm) -> None:
    """A node that a person drained stays drained, even when it is healthy."""
    slurm.reason = "fan replaced next week"

    assert slurm.run("health.sh") == 0
    assert slurm.calls == []


def test_health_resumes_nothing_that_it_cannot_judge(slurm: Slurm) -> None:
    """A node that has lost vramledger does not count as recovered."""
    slurm.reason = "vramledger: cannot tell"
    slurm.remove_vramledger()

    slurm.run("health.sh")
    assert slurm.calls == []
