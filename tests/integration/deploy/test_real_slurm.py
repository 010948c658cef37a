"""Prolog, epilog and health check under the real Slurm, with the stand-in driver."""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.slurm.cluster import HOLDER, Cluster, Site
from tests.support.standin.library import Code
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(300)]

QUICK = "WAIT=15\nSETTLE=5\nGRACE=1\n"
_GRES = "Name=gpu File=/dev/nvidia[2-3]\nName=shard Count=8"
SHARED = Site(devices=4, gres="gpu:2,shard:8", gres_conf=_GRES, settings=QUICK)
"""Slurm manages /dev/nvidia2 and 3 of four GPUs, and shares them."""


@contextmanager
def one(site: Site) -> Iterator[Cluster]:
    """Give a cluster for one test. These tests come first: two clusters cannot run at once."""
    with Cluster(site) as cluster:
        yield cluster


@pytest.mark.parametrize("proctrack", ["linuxproc", "pgid"])
def test_survivors_without_cgroups(proctrack: str) -> None:
    """Where Slurm tracks processes without cgroups, an epilog ends what has left its step, and only that."""
    options = {"TaskPlugin": "task/affinity", "PrologFlags": "Alloc"}
    options["ProctrackType"] = f"proctrack/{proctrack}"
    with one(replace(SHARED, options=options)) as cluster:
        other = cluster.submit("--gres=shard:1", hold="300 gpus=2", user="bob")
        holds(cluster, 1)
        ready = cluster.here / "out" / "ready"
        hold = f"300 gpus=2 escape=yes term=ignore ready={ready}"
        job = cluster.submit("--gres=shard:1", command=f"HOLDER 300 HOLDS {hold.partition(' ')[2]}; true")
        cluster.wait_for(job, "COMPLETED")
        wait_until(lambda: len(cluster.driver.holders) == 1, "the epilog has ended the survivor")
        assert cluster.state_of(other) == "RUNNING"
        cluster.run("scancel", str(other))
        cluster.wait_idle()
        assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")


def test_a_survivor_outside_the_jobs_cgroup() -> None:
    """A process that left its job's cgroup is ended, because its environment and its user show the job."""
    with one(SHARED) as cluster:
        ready = cluster.here / "out" / "ready"
        command = f"HOLDER 300 HOLDS gpus=2 escape=yes term=ignore ready={ready}; sleep 3"
        job = cluster.submit("--gres=gpu:1", command=command)
        holds(cluster, 1)
        (pid,) = cluster.driver.holders
        Path("/sys/fs/cgroup/freezer/cgroup.procs").write_text(str(pid), encoding="ascii")
        cluster.wait_for(job, "COMPLETED")
        cluster.wait_idle()
        assert cluster.driver.holders == []
        assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")


def test_instances() -> None:
    """Two jobs on two MIG instances of one GPU run side by side; a leftover on one drains for its own job."""
    lines = [
        "Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap21,/dev/nvidia-caps/nvidia-cap22",
        "Name=gpu MultipleFiles=/dev/nvidia0,/dev/nvidia-caps/nvidia-cap30,/dev/nvidia-caps/nvidia-cap31",
    ]
    minors = "gpu0/gi1/access 21\ngpu0/gi1/ci0/access 22\ngpu0/gi2/access 30\ngpu0/gi2/ci0/access 31\n"
    with one(Site(devices=1, gres="gpu:2", gres_conf="\n".join(lines), settings=QUICK)) as cluster:
        cluster.driver.standin.device(0).divide("3g.71gb", "3g.71gb")
        cluster.write_mig_minors(minors)
        first = cluster.submit("--gres=gpu:1", hold="4 gpus=0 mig=0")
        holds(cluster, 1)
        second = cluster.submit("--gres=gpu:1", hold="2 gpus=0 mig=1", user="bob")
        for job in (first, second):
            assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
        cluster.wait_idle()
        assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")
        cluster.wait_for(cluster.submit("--gres=gpu:1", hold="1 gpus=0 mig=0 dead=yes"), "COMPLETED")
        wait_until(lambda: cluster.reason().startswith("vram GPU0 dead 4GiB"), "the node is drained")


@pytest.mark.parametrize("version", ["older", "newer"])
def test_slurmd_detects_the_gpus(version: str) -> None:
    """With AutoDetect a job is judged on its own GPU, also where device files and NVML count differently."""
    site = Site(version=version, devices=4, gres="gpu:4", gres_conf="AutoDetect=nvml", settings=QUICK)
    with one(replace(site, autodetect=True, constrained=True, minors=(3, 2, 1, 0))) as cluster:
        driver = cluster.driver
        tries = "for n in 0 1 2 3; do (: 3<>/dev/nvidia$n) 2>&1 | grep -q permitted || echo $n; done"
        job = cluster.submit("--gres=gpu:1", command=f"{tries}; exec HOLDER 1 HOLDS gpus=0")
        assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
        assert (cluster.here / "out" / str(job)).read_text().split() == ["3"]
        cluster.wait_idle()
        cluster.run("/usr/bin/python3", str(HOLDER), "1", str(driver.directory), "gpus=3", "dead=yes")
        job = cluster.submit("--gres=gpu:1", hold="1 gpus=0")
        assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
        cluster.wait_idle()
        assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")
        cluster.run("/usr/bin/python3", str(HOLDER), "1", str(driver.directory), "gpus=0", "dead=yes")
        cluster.submit("--gres=gpu:1", hold="1 gpus=0")
        wait_until(cluster.reason, "the node is drained", patience=60)
        assert cluster.reason().startswith("vram GPU0 dead 4GiB")


@pytest.mark.parametrize(("version", "cgroup"), [("older", "v1"), ("newer", "v2")])
def test_jobs_share_a_gpu_through_mps(version: str, cgroup: str) -> None:
    """The MPS server that root has started drains nothing, unless it holds much."""
    gres = "Name=gpu File=/dev/nvidia[2-3]\nName=mps Count=200"
    site = replace(SHARED, version=version, cgroup=cgroup, gres="gpu:2,mps:200", gres_conf=gres)
    with one(site) as cluster:
        server = start_mps(cluster, "alice")
        hold(cluster, server, 66 * 2**20)
        jobs = [
            cluster.submit("--gres=mps:40", hold=f"{seconds} gpus=2", user=user)
            for seconds, user in ((4, "alice"), (2, "bob"))
        ]
        holds(cluster, 3)
        for job in jobs:
            assert cluster.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
        cluster.wait_idle()
        assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")
        hold(cluster, server, 2 * 2**30)
        cluster.submit("--gres=mps:40", hold="1 gpus=2")
        wait_until(cluster.reason, "the node is drained", patience=60)
        assert cluster.reason().startswith("vram GPU2 alice 2GiB")


def start_mps(cluster: Cluster, user: str) -> int:
    """Start root's control daemon of MPS, with a server for a user as its child; return the server's pid."""
    control, server = (f"/usr/local/bin/nvidia-cuda-mps-{name}" for name in ("control", "server"))
    cluster.run("cp", "/bin/bash", control)
    cluster.run("cp", "/bin/sleep", server)
    started = f'setpriv --reuid={user} --clear-groups {server} 600 >/dev/null 2>&1 & echo "$!"'
    leave = f"setsid {control} -c '{started}; exec >/dev/null; wait; true' </dev/null 2>/dev/null &"
    return int(cluster.run("bash", "-c", leave))


def hold(cluster: Cluster, pid: int, size: int) -> None:
    """Let a process hold memory on GPU 2, whatever it does."""
    start = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    place = cluster.driver.directory / f"{pid}.hold"
    fresh = place.with_suffix(".new")
    fresh.write_text(json.dumps({"pid": pid, "start": start, "gpus": [2], "bytes": size, "mig": None}))
    fresh.rename(place)


def test_a_health_check_of_slurmd() -> None:
    """The health check that slurmd itself runs drains a node whose driver is gone, and resumes it."""
    options = {"HealthCheckInterval": "3"}
    with one(replace(SHARED, options=options)) as cluster:
        cluster.driver.standin.driver_error = Code.DRIVER_NOT_LOADED
        wait_until(lambda: cluster.reason().startswith("vram? "), "the node is drained", patience=60)
        cluster.driver.standin.driver_error = 0
        wait_until(lambda: cluster.states() == {"n1": "IDLE"}, "the node is resumed", patience=60)


def test_preempted_jobs() -> None:
    """A job that is requeued for a more important one, and ignores SIGTERM, leaves the GPU to it clean."""
    options = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    with one(replace(SHARED, options=options, partitions=("low", "high"))) as cluster:
        preempted = cluster.submit(
            "--gres=gpu:2", "--partition=low", "--requeue", hold="300 gpus=2,3 term=ignore"
        )
        holds(cluster, 1)
        urgent = cluster.submit("--gres=gpu:1", "--partition=high", hold="2 gpus=2", user="bob")
        assert cluster.wait_for(urgent, "COMPLETED", "FAILED", timeout=90) == "COMPLETED"
        assert cluster.state_of(preempted) in ("PENDING", "RUNNING", "CONFIGURING")
        assert cluster.reason() == ""


@pytest.mark.parametrize("script", ["", "epilog"])
def test_a_reboot_while_a_job_runs(script: str) -> None:
    """After a reboot there is no record and no process: no job and no health check drains the node."""
    with one(SHARED) as cluster:
        job = cluster.submit("--gres=gpu:1", "--no-requeue", hold="300 gpus=2")
        holds(cluster, 1)
        cluster.signal("n1", signal.SIGKILL)
        cluster.stop("n1")
        daemons = [pid for pid in cluster.steps() if Path(f"/proc/{pid}/comm").read_text() == "slurmstepd\n"]
        for pid in (*daemons, *cluster.driver.holders):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        cluster.run("rm", "-rf", "/run/vramledger-slurm")
        holds(cluster, 0)
        if script:
            cluster.run("env", "-i", f"SLURM_JOB_ID={job}", "SLURM_JOB_GPUS=0", "SLURMD_NODENAME=n1",
                        f"/etc/slurm/vramledger/{script}.sh")  # fmt: skip
        cluster.start("n1", ["slurmd", "-D", "-b", "-N", "n1"])
        cluster.run("scancel", str(job), check=False)
        health(cluster)
        cluster.wait_for(job, "CANCELLED", "NODE_FAIL", "FAILED", "COMPLETED", "GONE", timeout=90)
        assert not cluster.reason().startswith("vram")
        if "IDLE" not in cluster.states()["n1"]:
            cluster.resume()
        wait_until(lambda: cluster.states() == {"n1": "IDLE"}, "the node is back", patience=60)
        job = cluster.submit("--gres=gpu:1", hold="1 gpus=2")
        assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
        assert cluster.reason() == ""


@pytest.fixture(scope="module", params=[("older", "v1"), ("newer", "v1"), ("newer", "v2")], ids="-".join)
def shared(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Give a cluster with shared GPUs, of each version of Slurm and of cgroups."""
    version, cgroup = request.param
    with Cluster(replace(SHARED, version=version, cgroup=cgroup)) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """Give the cluster with its node idle, its driver healthy and its GPUs free."""
    yield shared
    shared.driver.standin.driver_error = 0
    shared.driver.standin.release()
    shared.cancel_all()
    for pid in shared.driver.holders:
        with suppress(ProcessLookupError):  # it is dead memory, or the job has just ended
            os.kill(pid, signal.SIGKILL)
    shared.driver.forget_dead()
    shared.wait_idle()
    if shared.states()["n1"] != "IDLE":
        shared.resume()
    wait_until(lambda: shared.states()["n1"] == "IDLE", "the node is idle again")


def holds(cluster: Cluster, count: int) -> None:
    wait_until(lambda: len(cluster.driver.holders) == count, f"{count} holders")


def test_jobs_share_a_gpu(cluster: Cluster) -> None:
    """The second and third job on a shared GPU start beside the first one, and none drains the node."""
    jobs = [
        cluster.submit("--gres=shard:1", hold="4 gpus=2", user=user) for user in ("alice", "bob", "alice")
    ]
    holds(cluster, 3)
    for job in jobs:
        assert cluster.wait_for(job, "COMPLETED", "FAILED", "NODE_FAIL") == "COMPLETED"
    cluster.wait_idle()
    assert (cluster.states(), cluster.reason()) == ({"n1": "IDLE"}, "")


def test_the_exporter_shows_jobs_and_accounts(cluster: Cluster) -> None:
    """A job has its number in every version of Slurm; its account is known, also without a holder."""
    cluster.start("exporter", ["/usr/local/bin/vramledger", "serve"])
    try:
        holding = cluster.submit("--gres=gpu:1", "--account=physics", hold="300 gpus=2")
        idle = cluster.submit("--gres=gpu:1", "--account=chemistry", command="sleep 300", user="bob")
        ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:10839/metrics').read().decode())"

        def page() -> str:
            return cluster.run("/usr/bin/python3", "-c", ask, check=False)

        account = "vramledger_reservation_account_info"
        expected = [
            f'slurm_job="{holding}"',
            f'{account}{{account="physics",owner="{holding}",owner_type="slurm",user="alice"}} 1',
            f'{account}{{account="chemistry",owner="{idle}",owner_type="slurm",user="bob"}} 1',
        ]
        wait_until(lambda: all(each in page() for each in expected), "the page has both jobs", patience=45)
        assert re.search(r'slurm_job="s[0-9A-Z]{13}"', page()) is None
    finally:
        cluster.stop("exporter")
        cluster.cancel_all()
        cluster.wait_idle()


def test_a_leftover_on_the_jobs_gpu_drains(cluster: Cluster) -> None:
    """A leftover on GPU 2, which is Slurm's GPU 0, drains the node, and the job is requeued, not held."""
    driver = cluster.driver
    cluster.run("/usr/bin/python3", str(HOLDER), "1", str(driver.directory), "gpus=2", "dead=yes", "gib=20")
    job = cluster.submit("--gres=gpu:1", hold="1 gpus=2")
    wait_until(cluster.reason, "the node is drained")
    assert cluster.reason()[:20] == "vram GPU2 dead 20GiB"
    wait_until(lambda: cluster.state_of(job) == "PENDING", "the job is requeued")
    assert "held" not in cluster.run("squeue", "-h", "-o", "%r", "-j", str(job)).lower()


def test_slurmctld_does_not_answer(cluster: Cluster) -> None:
    """If the epilog cannot drain, it fails: the node does not come back idle with dead memory."""
    job = cluster.submit("--gres=gpu:1", hold="2 gpus=2 gib=11 dead=yes")
    cluster.wait_for(job, "RUNNING", "COMPLETED")
    cluster.run("bash", "-c", "mkdir -p /opt/slurm; printf '#!/bin/sh\\nexit 1\\n' >/opt/slurm/scontrol")
    cluster.run("chmod", "755", "/opt/slurm/scontrol")
    cluster.configure(QUICK + "SLURM_BIN=/opt/slurm\n")
    try:
        wait_until(lambda: "DRAIN" in cluster.states()["n1"], "slurmd has drained the node", patience=60)
        assert cluster.reason()
    finally:
        cluster.configure(QUICK)


def health(cluster: Cluster) -> None:
    """Run the health check as slurmd does: by root, with nothing in its environment but a parent's "-N"."""
    cluster.run("env", "-i", "bash", "-c", "/etc/slurm/vramledger/health.sh; true", "slurmd", "-N", "n1")
