"""Which processes count as Slurm's daemons."""

from pathlib import Path

import pytest

from vramledger.readers.hosts.host import Host
from vramledger.slurm.jobs import running_steps, step_daemons

DOCKER = f"0::/system.slice/docker-{'a5' * 32}.scope"
PODMAN = f"0::/user.slice/user-7.slice/user@7.service/libpod-{'a5' * 32}.scope"


@pytest.mark.parametrize(
    ("uids", "cgroup", "counts"),
    [
        ("0 0 0 0", "0::/system.slice/slurmstepd.scope/job_7/step_0/slurm", True),
        ("0 0 0 0", "0::/", True),
        ("1000 0 0 0", "0::/user.slice/user-1000.slice/session-5.scope", False),
        ("0 0 0 0", f"{DOCKER}/system.slice/slurmstepd.scope/job_7/step_0/slurm", False),
        ("0 0 0 0", PODMAN, False),
        ("1000 1000 1000 1000", "0::/", False),
    ],
    ids=["slurm", "without cgroups", "a setuid program", "a container's root", "rootless", "a user"],
)
def test_only_the_hosts_root_runs_daemons(tmp_path: Path, uids: str, cgroup: str, counts: bool) -> None:
    """Name and title are the program's own: who is not the host's root makes no job run."""
    (tmp_path / "stat").write_text("btime 1\n")
    home = tmp_path / "42"
    home.mkdir()
    (home / "comm").write_text("slurmstepd\n")
    (home / "cmdline").write_bytes(b"slurmstepd: [7.0]\0")
    (home / "status").write_text("Uid:\t" + "\t".join(uids.split()) + "\n")
    (home / "cgroup").write_text(cgroup + "\n")
    host = Host(tmp_path)
    assert list(step_daemons(host)) == ([(42, "7", "0")] if counts else [])
    assert (running_steps(host) is not None) == counts
