"""Owners of real processes: a container of Podman, a removed cgroup, a notebook, a user."""

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from tests.support import podman, requirements
from tests.support.exporter import SOURCES
from tests.support.players.stage import Stage
from tests.support.ports import free_port
from tests.support.procs import NOBODY
from tests.support.slurm.daemons import node_daemon, step_daemon
from tests.support.standin.library import MIB, StandIn, build
from tests.support.sure import sure
from tests.support.waiting import wait_until
from tests.unit.readers.owners.test_ended import Clock
from vramledger.config import SamplingConfig
from vramledger.model.reading import Owner, ProcessRow, decode
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners import reader
from vramledger.readers.owners.ended import MISSES_NEEDED
from vramledger.readers.owners.reader import OwnerReader
from vramledger.sampling.protocol import encode_config

KERNEL = "0f3a9d52-7c11-4b6e-9a55-1d2c3b4a5f60"


def asked(owners: OwnerReader, host: Host, pid: int) -> tuple[ProcessRow, Owner]:
    row = sure(host.row(pid))
    (learned,) = owners.add_owners([sure(host.facts(row))], timeout=30)
    return row, sure(learned.owner)


def fresh() -> tuple[OwnerReader, Host, Clock]:
    host, clock = Host(Path("/proc")), Clock()
    return OwnerReader(host, Path("/"), clock=clock), host, clock


def evidence(owners: OwnerReader, clock: Clock, row: ProcessRow) -> str | None:
    """Check once more and return why the owner has ended, if it has."""
    clock.now += reader.CHECK_INTERVAL
    return owners.check_owners([row])[0].get(row.pid)


@contextlib.contextmanager
def cgroup(path: str) -> Iterator[Path]:
    """Make a cgroup in the first hierarchy that allows it, and remove it with its parents."""
    requirements.require_root()
    for root in map(Path, ("/sys/fs/cgroup/systemd", "/sys/fs/cgroup/memory", "/sys/fs/cgroup")):
        made: list[Path] = []
        try:
            place = root
            for part in path.split("/"):
                place /= part
                if not place.exists():
                    place.mkdir()
                    made.append(place)
            if (place / "cgroup.procs").exists():
                yield place
                return
        except OSError:
            continue
        finally:
            for each in reversed(made):
                with contextlib.suppress(OSError):
                    each.rmdir()
    requirements.do_without("this machine does not let us make cgroups")


VS_CODE = f"kernel-v3{'0f' * 20}"


def notebook_of(pid: int) -> str:
    owners, host, _ = fresh()
    _, owner = asked(owners, host, pid)
    return owner.notebook


def test_what_a_kernel_of_vs_code_starts_is_its_notebooks(stage: Stage) -> None:
    """A kernel's workers and programs have the kernel's name, also without a variable, below a shell."""
    without = ["env", "--unset=JPY_SESSION_NAME", "--unset=JPY_PARENT_PID"]
    kernel = stage.start(words=[f'--f="/home/ada/my files/{VS_CODE}.json"'], wrapper=without)
    script = kernel.start(wrapper=["env", "-i"], session=True)
    (spawned,) = kernel.fork_workers("spawn", 1)
    rank = script.start()
    assert [notebook_of(each.pid) for each in (kernel, script, spawned, rank)] == [VS_CODE] * 4
    assert notebook_of(os.getpid()) == ""


def test_another_users_process_takes_no_notebook_from_its_ancestors(stage: Stage) -> None:
    """A program of another user below a kernel is not in that kernel's notebook."""
    requirements.require_root()
    kernel = stage.start(words=["-f", f"/run/{VS_CODE}.json"])
    others = kernel.start(("be_user", 65534))
    assert (notebook_of(kernel.pid), notebook_of(others.pid)) == (VS_CODE, "")


def test_a_notebook_is_kept_when_its_kernel_has_ended(stage: Stage) -> None:
    """A program that outlives its kernel keeps the notebook that it was started from."""
    kernel = stage.start(words=["-f", f"/run/{VS_CODE}.json"])
    survivor = kernel.start(session=True)
    owners, host, _ = fresh()
    asked(owners, host, survivor.pid)
    kernel.end()
    wait_until(lambda: getattr(host.row(survivor.pid), "ppid", kernel.pid) != kernel.pid, "another parent")
    _, owner = asked(owners, host, survivor.pid)
    assert owner.notebook == VS_CODE


def test_a_service_by_its_cgroup(stage: Stage) -> None:
    """A process in a cgroup as systemd makes it for a service belongs to that unit."""
    name = f"vramledger-test-{os.getpid()}.service"
    owners, host, _ = fresh()
    pid = stage.start().pid
    with cgroup(f"system.slice/{name}") as place:
        if "/memory/" in str(place):
            requirements.do_without("this machine has no cgroup hierarchy of systemd's that we may write")
        (place / "cgroup.procs").write_text(str(pid))
        _, owner = asked(owners, host, pid)
        (place.parents[1] / "cgroup.procs").write_text(str(pid))
    assert (owner.unit, owner.type, owner.name) == (name, "unit", name)


@pytest.mark.parametrize("end", ["\x0b", "\x0c", "\r", "\x1c", "\x1e", "\x85", "\u2028"])
def test_the_name_of_a_cgroup_forges_no_line(stage: Stage, end: str) -> None:
    """Who may make cgroups puts what some call a line's end into a name, and is in no pod for all that."""
    name = f"vramledger-test-{os.getpid()}.service"
    forged = f"a{end}0::/kubepods.slice/kubepods-pod{KERNEL.replace('-', '_')}.slice/crio-{'a' * 64}.scope"
    owners, host, _ = fresh()
    pid = stage.start().pid
    with cgroup(f"system.slice/{name}/{forged}") as place:
        root = Path(str(place).partition("/system.slice/")[0])
        os.chown(root / "system.slice" / name, NOBODY, NOBODY)  # delegated to its user
        (place / "cgroup.procs").write_text(str(pid))
        _, owner = asked(owners, host, pid)
        (root / "cgroup.procs").write_text(str(pid))
    assert (owner.type, owner.pod, owner.container) in {("unit", "", ""), ("user", "", "")}


def test_a_container_that_ended_makes_its_escaped_process_an_orphan(stage: Stage) -> None:
    """A process that was moved out of its container keeps this owner until its cgroup is removed."""
    container = uuid.uuid4().hex * 2
    owners, host, clock = fresh()
    pid = stage.start().pid
    with cgroup(f"docker/{container}") as place:
        (place / "cgroup.procs").write_text(str(pid))
        row, owner = asked(owners, host, pid)
        assert (owner.type, owner.name) == ("container", container[:12])
        (place.parents[1] / "cgroup.procs").write_text(str(pid))
        assert [evidence(owners, clock, row) for _ in range(5)] == [None] * 5
        place.rmdir()
        wait_until(lambda: evidence(owners, clock, row), "the evidence")
        why = sure(evidence(owners, clock, row))
    assert why.startswith(f"its container {container[:12]} has ended: the process is outside of its cgroup")


def test_containers_of_two_namespaces_do_not_end_each_other(tmp_path: Path, stage: Stage) -> None:
    """A running container whose runtime keeps its marks elsewhere is not ended by a neighbour with one."""
    containers = [uuid.uuid4().hex * 2 for _ in range(2)]
    host, clock = Host(Path("/proc")), Clock()
    owners = OwnerReader(host, tmp_path, clock=clock)
    (tmp_path / "run/containerd/io.containerd.runtime.v2.task/default" / containers[0]).mkdir(parents=True)
    rows = []
    with contextlib.ExitStack() as stack:
        for container in containers:
            place = stack.enter_context(cgroup(f"system.slice/nerdctl-{container}.scope"))
            pid = stage.start().pid
            (place / "cgroup.procs").write_text(str(pid))
            stack.callback((place.parents[1] / "cgroup.procs").write_text, str(pid))
            row, owner = asked(owners, host, pid)
            assert (owner.type, owner.name) == ("container", container[:12])
            rows.append(row)
        ended: dict[int, str] = {}
        watched = owners._holders[rows[0].pid, rows[0].start].watched  # noqa: SLF001 to know that checks have been

        def step() -> bool:
            clock.now += reader.CHECK_INTERVAL
            ended.update(owners.check_owners(rows)[0])
            return sure(watched).checks >= 2 * MISSES_NEEDED

        wait_until(step, "some checks")
    assert ended == {}


@pytest.mark.thorough
def test_a_container_of_podman(tmp_path: Path) -> None:
    """A real container has Podman's name, and is alive by Podman's marks until it is stopped."""
    with podman.busybox_image(tmp_path) as image, podman.container(image) as (name, pid):
        owners, host, clock = fresh()
        row, owner = asked(owners, host, pid)
        assert (owner.type, owner.name, owner.container) == ("container", name, name)
        assert [evidence(owners, clock, row) for _ in range(20)] == [None] * 20
        watched = sure(owners._holders[row.pid, row.start].watched)  # noqa: SLF001 to know that a look has been
        wait_until(lambda: evidence(owners, clock, row) or watched.seen, "the evidence, or a look")
        assert not watched.evidence
        subprocess.run(["podman", "kill", name], check=True, capture_output=True)
        # The process has ended too; this row is what a driver would still list of it.
        wait_until(lambda: evidence(owners, clock, row), "the evidence")
        assert "its runtime no longer has the container" in (evidence(owners, clock, row) or "")


@pytest.mark.thorough
def test_a_notebook_of_a_real_jupyter_server(tmp_path: Path) -> None:
    """The kernel that a Jupyter server starts for a notebook has that notebook's path."""
    for module in ("jupyter_server", "ipykernel"):
        if importlib.util.find_spec(module) is None:
            requirements.do_without(f"{module} is not installed")
    port = free_port()
    (tmp_path / "gan.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    options = ["--no-browser", "--allow-root", "--IdentityProvider.token=test", f"--port={port}"]
    command = [sys.executable, "-m", "jupyter_server", *options, f"--ServerApp.root_dir={tmp_path}"]
    # Its own directories too, so that the machine's configuration does not matter.
    own = {"HOME": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path / "run"), "JUPYTER_PLATFORM_DIRS": "0"}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(command, env={**os.environ, **own}, stderr=log) as server,
    ):
        try:
            wait_until(lambda: _api(port, "kernelspecs"), "Jupyter's answer")
            session = {"path": "gan.ipynb", "type": "notebook", "name": "gan.ipynb"}
            assert _api(port, "sessions", {**session, "kernel": {"name": "python3"}})
            children = psutil.Process(server.pid).children()
            (pid,) = [child.pid for child in children if "ipykernel" in " ".join(child.cmdline())]
            assert notebook_of(pid) == str(tmp_path / "gan.ipynb")
        finally:
            server.terminate()


def _api(port: int, what: str, body: object = None) -> object:
    """Send a request to a Jupyter server; None when it does not answer yet."""
    data = None if body is None else json.dumps(body).encode()
    url, headers = f"http://127.0.0.1:{port}/api/{what}", {"Authorization": "token test"}
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 our own server
            return json.load(answer)
    except OSError:
        return None


def test_a_step_whose_daemon_has_ended(stage: Stage) -> None:
    """With cgroups of version 1, a process is left over when slurmd runs and its step's daemon does not."""
    job = 900_000_000 + os.getpid()
    survivor = stage.start()
    owners, host, clock = fresh()
    with cgroup(f"slurm_n1/uid_0/job_{job}/step_batch") as place, node_daemon():
        (place / "cgroup.procs").write_text(str(survivor.pid))
        with step_daemon(job), step_daemon(job, "extern"):
            row, owner = asked(owners, host, survivor.pid)
            assert (owner.type, owner.name) == ("slurm", str(job))
            for _ in range(MISSES_NEEDED + 1):
                assert evidence(owners, clock, row) is None
        wait_until(lambda: evidence(owners, clock, row), "the end is seen")
        survivor.end()


def test_a_job_whose_cgroup_has_its_sluid(stage: Stage) -> None:
    """A job has its number, which its step's daemon says, also after it; a user's process cannot say it."""
    job, sluid = 900_000_000 + os.getpid(), "s5K1KKYAYG5D00"
    holder, later = stage.start(), stage.start()
    owners, host, _ = fresh()
    scope = f"system.slice/n1_slurmstepd.scope/{sluid}/step_batch"
    with cgroup(scope) as place, cgroup(f"{scope}/user") as user, cgroup(f"{scope}/slurm") as daemons:
        (user / "cgroup.procs").write_text(str(holder.pid))
        _, owner = asked(owners, host, holder.pid)
        assert owner.slurm_job == sluid
        with step_daemon(job) as pid:
            (daemons / "cgroup.procs").write_text(str(pid))
            _, owner = asked(owners, host, holder.pid)
            assert (owner.type, owner.name, owner.slurm_job) == ("slurm", str(job), str(job))
        (user / "cgroup.procs").write_text(str(later.pid))
        _, owner = asked(owners, host, later.pid)
        assert owner.name == str(job)
        holder.end()
        later.end()
        assert place.is_dir()


def test_a_zombie_belongs_to_its_job(stage: Stage) -> None:
    """Version 1 of cgroups shows a zombie at the root: it is still its job's, and not its user's."""
    process = stage.start()
    owners, host, _ = fresh()
    with cgroup(f"slurm_n1/uid_0/job_{900_000_000 + os.getpid()}/step_batch") as place:
        (place / "cgroup.procs").write_text(str(process.pid))
        row, before = asked(owners, host, process.pid)
        facts = sure(host.facts(row))
        (again,) = owners.add_owners([replace(facts, parent=None, cgroup=("1:name=systemd:/",))], timeout=30)
        process.end()
    assert (before.type, again.owner) == ("slurm", before)


def test_names_come_with_the_holders_first_sample(tmp_path: Path, stage: Stage) -> None:
    """The first sample that lists a new holder also has its owner."""
    command = [sys.executable, "-m", "vramledger.sampling.sampler", encode_config(SamplingConfig())]
    pid = stage.start(env={"JPY_SESSION_NAME": "/home/ada/gan.ipynb"}).pid
    with StandIn(tmp_path, build(tmp_path)) as standin:
        standin.device(0).set_processes([(pid, 500 * MIB)])
        environment = {**os.environ, **standin.env(), "PYTHONPATH": str(SOURCES)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as sampler:
            reading = decode(sure(sampler.stdout).readline())
            sampler.kill()
    (facts,) = reading.facts
    assert (facts.pid, reading.ended) == (pid, {})
    assert sure(facts.owner).notebook == "/home/ada/gan.ipynb"
