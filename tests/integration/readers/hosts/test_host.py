"""A host identifies itself, and distinguishes an ended process from a hidden one."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.support.procs import NOBODY, PROC, FakeProc, stat_line
from tests.support.requirements import require_root
from tests.support.stranger import as_user, strange
from tests.support.sure import sure
from vramledger.errors import StartupError
from vramledger.model.reading import ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import open_plain, parse_comm, parse_stat
from vramledger.readers.owners.host_files import HostFiles


def test_the_host_says_who_it_is(host: Host) -> None:
    """Boot id and clock are the kernel's."""
    assert host.boot_id == (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert f"btime {host.boot_time:.0f}\n" in (PROC / "stat").read_text(encoding="ascii")
    assert host.ticks == os.sysconf("SC_CLK_TCK")
    assert os.getpid() in host.pids()


def test_the_boot_time_follows_a_clock_that_is_set() -> None:
    """A step of NTP moves the boot time, as it moves the kernel's; the jitter of two reads does not."""
    by_clocks = [1000.0]
    host = Host(PROC, boot_by_clocks=lambda: by_clocks[0])
    real = host.boot_time
    for now, moved in ((1000.05, 0.0), (4600.0, 3600.0), (4600.09, 3600.0), (400.0, -600.0)):
        by_clocks[0] = now
        assert host.boot_time == pytest.approx(real + moved)
        assert host.started_at(host.ticks) == pytest.approx(real + moved + 1)


WSL = "5.15.167.4-microsoft-standard-WSL2"
FIRST = "pid:[4026531836]"


@pytest.mark.parametrize(
    ("link", "kernel", "expected"),
    [(FIRST, "6.8.0-40-generic", True), (FIRST, None, True), ("pid:[4026532177]", None, False),
     (None, None, None), (FIRST, WSL, False)],
)  # fmt: skip
def test_pid_namespaces(proc: FakeProc, link: str | None, kernel: str | None, expected: bool | None) -> None:
    """Only the kernel's first PID namespace is the host's, and in WSL2 it has not every holder of the GPU."""
    (proc.root / "self/ns").mkdir(parents=True)
    if kernel is not None:
        (proc.root / "sys/kernel").mkdir(parents=True)
        (proc.root / "sys/kernel/osrelease").write_text(f"{kernel}\n")
    if link is not None:
        (proc.root / "self/ns/pid").symlink_to(link)
    assert Host(proc.root).pid_namespace() is expected


def test_no_proc_is_a_start_error_that_says_what_to_do(tmp_path: Path) -> None:
    """Without a proc file system nothing starts, and the message names the flag."""
    with pytest.raises(StartupError, match=r"--path\.procfs"):
        Host(tmp_path)


def test_gone_and_denied_are_told_apart_in_a_foreign_proc(proc: FakeProc) -> None:
    """In another namespace's procfs only an entry proves a process: our own pids mean nothing there."""
    (proc.root / "77").mkdir()
    host = Host(proc.root)
    assert os.getpid() != 77
    assert host.rows([1, 77, os.getpid(), 0, -1]) == (
        (host.row(1),),
        {77: "denied", os.getpid(): "gone", 0: "gone", -1: "gone"},
    )


def test_a_process_hidden_by_hidepid_is_denied(hidden_proc: Path, host: Host) -> None:
    """Where proc hides other users' processes, an existing one is denied, and a missing one is gone."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    blind = Host(hidden_proc)
    with as_user(NOBODY):
        assert blind.rows([1, ended.pid]) == ((), {1: "denied", ended.pid: "gone"})
        assert host.row(1) is not None


def test_cpu_time_of_another_process() -> None:
    """The CPU time of a process is what that process itself sees, and it grows with its work only."""
    code = "import time\nwhile True:\n input()\n sum(range(300_000))\n print(time.process_time(), flush=True)"
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as process:
        host, seen = Host(Path("/proc")), []
        for _ in range(2):
            sure(process.stdin).write("\n")
            own = float(sure(process.stdout).readline())
            # It has printed, and goes back to its next input: that takes some microseconds of its own.
            seen.append((sure(host.cpu_seconds(process.pid)), own))
        process.kill()
    (first, own_first), (second, own_second) = seen
    assert own_first <= first + 1e-4 < second
    assert second - first == pytest.approx(own_second - own_first, rel=0.2, abs=0.002)
    assert host.cpu_seconds(process.pid) is None, "it has ended"


def test_cpu_time_in_another_pid_namespace_is_not_known(proc: FakeProc) -> None:
    """A procfs that numbers processes in another way than we do gives no CPU time."""
    assert Host(proc.root).cpu_seconds(os.getpid()) is None


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
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as child:
        rows = []
        for _ in range(2):
            sure(child.stdout).readline()
            rows.append(sure(host.row(child.pid)))
            assert rows[-1] == host.row(child.pid)
            sure(child.stdin).write("\n")
    before, after = rows
    assert before.program != after.program != 0 != before.program
    assert before._replace(program=0, state="") == after._replace(program=0, state="")


@pytest.mark.parametrize("length", [0, 5, 60])
def test_half_a_stat_is_no_row(proc: FakeProc, length: int) -> None:
    """A stat that is cut short counts as no process, and stops nothing."""
    row = proc.add(42)
    proc.stat(42).write_bytes(stat_line(42)[:length])
    host = Host(proc.root)
    assert (host.row(42), host.facts(row)) == (None, None)
    assert host.rows([42, 1])[0] == (host.row(1),)


def test_many_threads_make_no_row_dear(host: Host) -> None:
    """A program with thousands of threads is read as fast as another one: any user may have such programs."""

    def cost(pid: int) -> float:
        begun = time.thread_time()
        for _ in range(50):
            assert host.row(pid) is not None
        return time.thread_time() - begun

    require_root()
    with strange("threads", "4000") as child:
        assert sure(host.row(child.pid)).threads > 1000
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
