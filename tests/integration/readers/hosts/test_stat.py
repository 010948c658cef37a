"""The row of a process is right for every name and every race."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.support.procs import FakeProc, host, stat_line
from tests.support.requirements import require_root
from tests.support.stranger import strange
from tests.support.sure import sure
from vramledger.model.reading import ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import open_plain, parse_comm, parse_stat
from vramledger.readers.owners.host_files import HostFiles

__all__ = ["host"]


@pytest.mark.parametrize(
    "comm",
    [b"python3", b"tmux: server", b"a) S 7 (b", b"x)", b"))) R 1 1", b"two\nlines", b"\xff\xfe\x00", b""],
)
def test_a_row_survives_every_name(comm: bytes) -> None:
    """A program may choose any name: the row after the name is read right."""
    row = parse_stat(42, stat_line(42, comm, ppid=7, pgrp=40, start=12345))
    assert row == ProcessRow(42, 12345, "S", 7, 40, 40, 34816, 7)
    assert parse_comm(stat_line(42, comm)) == comm


def test_another_program_has_another_number(host: Host) -> None:
    """A process that executes a program, the same one too, keeps pid and start, and has another number."""
    wait = "import os, sys; print(flush=True); sys.stdin.readline()"
    command = [sys.executable, "-c", f"{wait}; os.execv(sys.executable, [sys.executable, '-c', {wait!r}])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        rows = []
        for _ in range(2):
            sure(child.stdout).readline()
            rows.append(host.row(child.pid))
            assert rows[-1] == host.row(child.pid)
            child.stdin.write("\n")
            child.stdin.flush()
    before, after = rows
    assert before is not None
    assert after is not None
    assert before.program != after.program != 0 != before.program
    assert before._replace(program=0, state="") == after._replace(program=0, state="")


@pytest.mark.parametrize("length", [0, 5, 60])
def test_half_a_stat_is_no_row(proc: FakeProc, length: int) -> None:
    """A stat that is cut short counts as no process, and stops nothing."""
    row = proc.add(42)
    proc.stat(42).write_bytes(stat_line(42)[:length])
    host = Host(proc.root)
    assert host.row(42) is None
    assert host.rows([42, 1])[0] == (host.row(1),)
    assert host.facts(row) is None


def test_many_threads_make_no_row_dear(host: Host) -> None:
    """A program with thousands of threads is read as fast as another one: any user may have such programs."""

    def cost(pid: int) -> float:
        begun = time.thread_time()
        for _ in range(50):
            assert host.row(pid) is not None
        return time.thread_time() - begun

    require_root()
    with strange("threads", "4000") as child:
        row = sure(host.row(child.pid))
        assert row.threads > 1000
        found, usual = min(cost(child.pid) for _ in range(3)), min(cost(os.getpid()) for _ in range(3))
    assert found < 5 * usual


def test_what_is_no_file_is_not_even_opened(tmp_path: Path) -> None:
    """A link of a user to a pipe or a device, in the place of a file, opens none: that may do something."""
    pipe, place = tmp_path / "pipe", tmp_path / "libcuda.so.1"
    os.mkfifo(pipe)
    place.symlink_to(pipe)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(os.open, pipe, os.O_WRONLY)  # goes on when somebody opens it to read
        try:
            with pytest.raises(OSError, match="it is not a file"):
                open_plain(str(place))
            assert HostFiles(tmp_path).read("pipe", 100) is None
            assert wait({waiting}, 0.2).done == set()
        finally:
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
            os.close(waiting.result(10))
