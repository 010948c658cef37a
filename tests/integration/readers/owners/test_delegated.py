"""Whose directory a cgroup is, in every hierarchy and from within a cgroup namespace of our own."""

import os
from pathlib import Path

import pytest

from tests.support.procs import NOBODY
from tests.support.requirements import require_root
from vramledger.readers.owners.cgroups import CgroupPlace, parse_cgroup
from vramledger.readers.owners.host_files import HostFiles

ID, UID = "a5" * 32, "0f1e2d3c-0000-4000-8000-0123456789ab"
JOB, POD, DOCKER = "slurm/uid_1001/job_9/step_0", f"kubepods/pod{UID}/{ID}", f"docker-{ID}.scope"
ROOTS, ADAS, GROUPS, WORLD = (0, 0, 0o775), (NOBODY, 0, 0o755), (0, NOBODY, 0o775), (0, 0, 0o757)


def place_of(host: Path, line: str, cgroup: str, kept: tuple[int, int, int] = ROOTS) -> CgroupPlace:
    """Return what a line says on a host where a cgroup has an owner, a group and a mode."""
    require_root()
    made = host / "sys/fs/cgroup" / cgroup
    made.mkdir(parents=True)
    os.chown(made, *kept[:2])
    made.chmod(kept[2])
    return parse_cgroup([line], users_own=HostFiles(host).users_own)._replace(path="", unit="")


@pytest.mark.parametrize("below", [JOB, POD, f"docker/{ID}"])
@pytest.mark.parametrize(
    ("controllers", "hierarchy"),
    [
        ("freezer", "freezer"), ("cpu,cpuacct", "cpu,cpuacct"), ("cpuacct,cpu", "cpu,cpuacct"),
        ("cpu,cpuacct", "cpuacct"), ("name=systemd", "systemd"), ("name=elogind", "elogind"), ("", "unified"),
        ("", "."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kept", [ROOTS, ADAS, GROUPS, WORLD])
def test_no_hierarchy_lets_a_user_name_a_job(
    tmp_path: Path, controllers: str, hierarchy: str, below: str, kept: tuple[int, int, int]
) -> None:
    """Whoever may make a cgroup in a hierarchy of either version is in no job, pod or container for that."""
    found = place_of(tmp_path, f"4:{controllers}:/users/ada/{below}", f"{hierarchy}/users/ada", kept)
    assert (found == CgroupPlace()) is (kept != ROOTS)


@pytest.mark.parametrize("kept", [ROOTS, ADAS])
@pytest.mark.parametrize("first", ["0::/../..", "0::/../../init.scope"])
def test_from_within_a_namespace_a_delegated_unit_is_seen(
    tmp_path: Path, first: str, kept: tuple[int, int, int]
) -> None:
    """What is as far outside as the first process has its whole path, below which its owner names nothing."""
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/cgroup").write_text(f"{first}\n")
    found = place_of(tmp_path, f"0::/../../system.slice/a.service/{JOB}", "system.slice/a.service", kept)
    assert (found == CgroupPlace()) is (kept != ROOTS)


@pytest.mark.parametrize(
    ("path", "attested"),
    [
        (f"/../{DOCKER}", True),
        (f"/../kubepods-burstable-pod{UID.replace('-', '_')}.slice/cri-containerd-{ID}.scope", True),
        (f"/../../besteffort/pod{UID}/{ID}", True),
        ("/../slurmstepd.scope/job_9", True),
        (f"/../a.service/{DOCKER}", False),
        (f"/../a.service/{POD}", False),
        (f"/../../../a.scope/{JOB}", False),
        (f"/system.slice/a.service/{JOB}", False),  # it cannot be looked at
        (f"/system.slice/{DOCKER}", True),
    ],
)
def test_what_is_beside_us_in_a_namespace(tmp_path: Path, path: str, attested: bool) -> None:
    """Pods, containers and jobs beside our own container have owners; what a unit may have made has none."""
    (tmp_path / "proc/1").mkdir(parents=True)
    (tmp_path / "proc/1/cgroup").write_text("0::/../../../../init.scope\n")
    assert (place_of(tmp_path, f"0::{path}", "a.service") != CgroupPlace()) is attested
