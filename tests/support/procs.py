"""The proc file systems that the tests read: the real one, or a directory for what a dying process shows."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.requirements import do_without, require_root
from tests.support.stranger import as_user
from vramledger.model.reading import ProcessFacts, ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import parse_stat

PROC = Path("/proc")
NOBODY = 65534


def stat_line(pid: int, comm: bytes = b"python3", *, ppid: int = 1, pgrp: int = 1, start: int = 500) -> bytes:
    """Write a ``stat`` as the kernel does, from Linux 6.18."""
    numbers = b"-1 4194560 100 0 0 0 5 3 0 0 20 0 7 0 %d 9000000 800 18446744073709551615" % start
    return b"%d (%b) S %d %d %d 34816 " % (pid, comm, ppid, pgrp, pgrp) + numbers + b" 1 1 0\n"


class FakeProc:
    """A directory that looks like /proc."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "stat").write_bytes(b"cpu 1 2 3\nbtime 1795230235\n")
        self.add(1, comm=b"systemd", ppid=0)

    def add(  # noqa: PLR0913 one for each file
        self,
        pid: int,
        *,
        comm: bytes = b"python3",
        ppid: int = 1,
        pgrp: int | None = None,
        start: int = 500,
        cmdline: bytes = b"python3\0train.py\0",
        environ: bytes = b"",
        maps: bytes = b"",
        status: bytes = b"Uid:\t0\t0\t0\t0\nSigIgn:\t0000000000000000\n",
    ) -> ProcessRow:
        """Add a process, or replace it."""
        place = self.root / str(pid)
        (place / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        pgrp = pid if pgrp is None else pgrp
        line = stat_line(pid, comm, ppid=ppid, pgrp=pgrp, start=start)
        self.stat(pid).write_bytes(line)
        (place / "status").write_bytes(status)
        (place / "cmdline").write_bytes(cmdline)
        (place / "environ").write_bytes(environ)
        (place / "maps").write_bytes(maps)
        (place / "cgroup").write_bytes(b"0::/user.slice\n")
        return parse_stat(pid, line)

    def facts(self, **files: Any) -> ProcessFacts:  # noqa: ANN401 those of ``add``
        """Add process 42, and read its facts."""
        return known(Host(self.root).facts(self.add(42, **files)))

    def hold(self, pid: int, *targets: str) -> None:
        """Let a process have these files open, and no others."""
        place = self.root / str(pid) / "fd"
        place.mkdir()
        for number, target in enumerate(targets):
            (place / str(number)).symlink_to(target)

    def stat(self, pid: int) -> Path:
        """Return the file from which its row is read."""
        return self.root / f"{pid}/task/{pid}/stat"

    def hang(self, pid: int, name: str) -> Path:
        path = self.root / str(pid) / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
        return path


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    """Return an empty /proc with an init."""
    (tmp_path / "proc").mkdir()
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def host() -> Host:
    """Look at this very host."""
    return Host(PROC)


@pytest.fixture
def as_nobody() -> Iterator[None]:
    """Run as a user who may not look into root's processes."""
    require_root()
    with as_user(NOBODY):
        yield


def known(facts: ProcessFacts | None) -> ProcessFacts:
    assert facts is not None
    return facts


@pytest.fixture
def hidden_proc() -> Iterator[Path]:
    """Mount a proc that hides other users' processes from everybody, and from group 0."""
    require_root()
    with tempfile.TemporaryDirectory() as directory:  # pytest's own are closed to other users
        Path(directory).chmod(0o755)
        mount = ["mount", "-t", "proc", "-o", "hidepid=2,gid=54321", "proc", directory]
        if subprocess.run(mount, check=False).returncode != 0:
            do_without("this machine does not let us mount a proc file system")
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)
