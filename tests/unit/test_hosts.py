"""Reading /proc: races, permissions, reads that hang, and the search for hidden holders.

What only a broken or dying process shows is played by a directory that looks like /proc: a FIFO in the
place of a file is a read that hangs. Everything else is read from the real one.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.requirements import do_without, require_root
from vramledger.errors import StartupError
from vramledger.hosts import FactsReader, HiddenSearch, Host
from vramledger.hosts.guard import Guard
from vramledger.hosts.stat import parse_comm, parse_stat
from vramledger.readings import HiddenHolder, ProcessFacts, ProcessRow

PROC = Path("/proc")
NOBODY = 65534
SECRET = "hunter2"  # noqa: S105 what must never come out


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
        place.mkdir(exist_ok=True)
        pgrp = pid if pgrp is None else pgrp
        line = stat_line(pid, comm, ppid=ppid, pgrp=pgrp, start=start)
        (place / "stat").write_bytes(line)
        (place / "status").write_bytes(status)
        (place / "cmdline").write_bytes(cmdline)
        (place / "environ").write_bytes(environ)
        (place / "maps").write_bytes(maps)
        (place / "cgroup").write_bytes(b"0::/user.slice\n")
        return parse_stat(pid, line)

    def hang(self, pid: int, name: str) -> Path:
        """Make the read of a file hang until somebody writes to it."""
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
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what another thread or process does."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def known(facts: ProcessFacts | None) -> ProcessFacts:
    """Insist that there are facts."""
    assert facts is not None
    return facts


# --- stat ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "comm",
    [b"python3", b"tmux: server", b"a) S 7 (b", b"x)", b"))) R 1 1", b"two\nlines", b"\xff\xfe\x00", b""],
)
def test_a_row_survives_every_name(comm: bytes) -> None:
    """A program may call itself what it likes: the row behind its name is read right."""
    row = parse_stat(42, stat_line(42, comm, ppid=7, pgrp=40, start=12345))
    assert row == ProcessRow(42, 12345, "S", 7, 40, 40, 34816, 7)
    assert parse_comm(stat_line(42, comm)) == comm


@pytest.mark.parametrize("length", [0, 5, 60])
def test_half_a_stat_is_no_row(proc: FakeProc, length: int) -> None:
    """A stat that is cut short is no process, and stops nothing."""
    row = proc.add(42)
    (proc.root / "42/stat").write_bytes(stat_line(42)[:length])
    host = Host(proc.root)
    assert host.row(42) is None
    assert host.rows([42, 1])[0] == (host.row(1),)
    assert host.facts(row) is None


# --- the host -----------------------------------------------------------------------------------------


def test_the_host_says_who_it_is(host: Host) -> None:
    """Boot and clock are those that the kernel gives."""
    assert host.boot_id == (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    assert f"btime {host.boot_time:.0f}\n" in (PROC / "stat").read_text(encoding="ascii")
    assert host.ticks == os.sysconf("SC_CLK_TCK")
    assert os.getpid() in host.pids()


@pytest.mark.parametrize(
    ("link", "expected"), [("pid:[4026531836]", True), ("pid:[4026532177]", False), (None, None)]
)
def test_the_pid_namespace_is_known_by_its_inode(
    proc: FakeProc, link: str | None, expected: bool | None
) -> None:
    """Only the kernel's first PID namespace is the host's; not being able to tell is no answer."""
    (proc.root / "self/ns").mkdir(parents=True)
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


@pytest.fixture
def hidden_proc() -> Iterator[Path]:
    """Mount a proc that shows nobody (and not group 0 either) another user's processes."""
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


def test_a_process_hidden_by_hidepid_is_denied(hidden_proc: Path, host: Host) -> None:
    """Where proc hides others' processes, one that exists is denied, and one that does not is gone."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    blind = Host(hidden_proc)
    os.seteuid(NOBODY)
    try:
        assert blind.rows([1, ended.pid]) == ((), {1: "denied", ended.pid: "gone"})
        assert host.row(1) is not None
    finally:
        os.seteuid(0)


# --- facts --------------------------------------------------------------------------------------------


def test_only_the_names_of_worker_variables_are_kept(proc: FakeProc) -> None:
    """Of an environment come out the names that say worker, however far back, and no value at all."""
    filler = b"".join(b"SERVICE_%d=%b\0" % (n, b"x" * 100) for n in range(6000))
    environ = b"TOKEN=hunter2\0MY_LOCAL_RANK=1\0" + filler + b"LOCAL_RANK=hunter2\0PMIX_RANK=hunter2\0"
    facts = known(Host(proc.root).facts(proc.add(42, environ=environ)))
    assert facts.signs == ("LOCAL_RANK", "PMIX_RANK")
    assert SECRET not in repr(facts)
    assert "SERVICE" not in repr(facts)


@pytest.mark.parametrize(
    ("value", "nspid", "expected"),
    [
        (b"42", b"42", True),
        (b"41", b"42", False),
        (b"7", b"42 7", True),
        (b"", b"42", False),
        (b"x", b"42", False),
    ],
)
def test_a_service_main_process_is_the_one_that_systemd_named(
    proc: FakeProc,
    value: bytes,
    nspid: bytes,
    expected: bool,
) -> None:
    """Children inherit the variable with their parent's pid; a container's systemd names its own pids."""
    row = proc.add(42, environ=b"SYSTEMD_EXEC_PID=" + value + b"\0A=b\0", status=b"NSpid:\t" + nspid + b"\n")
    assert known(Host(proc.root).facts(row)).service_main is expected


def test_ignored_signals_come_from_the_mask(proc: FakeProc) -> None:
    """HUP, INT and QUIT are named, other ignored signals (SIGPIPE here) are not."""
    row = proc.add(42, status=b"SigIgn:\t0000000000001005\n")
    assert known(Host(proc.root).facts(row)).ignores == ("HUP", "QUIT")


def test_facts_of_another_process_with_the_pid_are_dropped(proc: FakeProc) -> None:
    """When the pid was given out again between row and facts, there are no facts."""
    row = proc.add(42, start=500)
    proc.add(42, start=900)
    host = Host(proc.root)
    assert host.facts(row) is None
    assert host.outline(row) is None


def test_facts_tell_of_the_parent_of_now(proc: FakeProc) -> None:
    """When the parent ended between row and facts, the adopter is the parent."""
    proc.add(41, comm=b"launcher", start=400)
    row = proc.add(42, ppid=41)
    proc.add(42, ppid=1)
    parent = known(Host(proc.root).facts(row)).parent
    assert parent is not None
    assert (parent.pid, parent.comm) == (1, "systemd")


def test_a_younger_process_is_no_parent(proc: FakeProc) -> None:
    """A process that started after its supposed child merely has the pid of the parent that ended."""
    proc.add(41, start=600)
    assert known(Host(proc.root).facts(proc.add(42, ppid=41, start=500))).parent is None


@pytest.mark.parametrize(("ppid", "expected"), [(0, None), (999, None)])
def test_a_parent_that_is_not_there_is_none(proc: FakeProc, ppid: int, expected: None) -> None:
    """A parent outside our PID namespace (0) or one that just ended is none."""
    assert known(Host(proc.root).facts(proc.add(42, ppid=ppid))).parent is expected


@pytest.mark.parametrize(
    ("pgrp", "state", "expected"),
    [(42, b"S", True), (40, b"S", True), (40, b"Z", False), (39, b"S", False), (0, b"S", None)],
)
def test_the_leader_of_the_group_lives_or_not(
    proc: FakeProc,
    pgrp: int,
    state: bytes,
    expected: bool | None,
) -> None:
    """A leader that is a zombie or missing is dead; one outside our namespace is not known."""
    proc.add(40)
    (proc.root / "40/stat").write_bytes(stat_line(40).replace(b") S ", b") " + state + b" "))
    assert known(Host(proc.root).facts(proc.add(42, pgrp=pgrp))).leader_alive is expected


def test_users_have_the_names_of_the_host(proc: FakeProc, tmp_path: Path) -> None:
    """With a root file system given, names come from its list; a user without a name is a number."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_bytes(
        b"root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\nada:x:1001:1001::/:/bin/sh\n"
    )
    host = Host(proc.root, tmp_path)
    rows = [proc.add(50 + n, status=b"Uid:\t%d\t0\t0\t0\n" % uid) for n, uid in enumerate((0, 1001, 4242))]
    assert [known(host.facts(row)).user for row in rows] == ["root", "ada", "4242"]


@pytest.mark.usefixtures("as_nobody")
def test_what_is_denied_is_named(host: Host) -> None:
    """Without privileges a foreign process has its public facts, and the others are named as denied."""
    row = host.row(1)
    assert row is not None
    facts = known(host.facts(row))
    assert (facts.uid, facts.denied) == (0, ("environ", "maps"))
    assert facts.libraries is None
    assert facts.command
    assert facts.cgroup is not None


# --- reads that hang ----------------------------------------------------------------------------------


def _collect(reader: FactsReader, facts: dict[int, ProcessFacts], *pids: int) -> bool:
    facts.update({each.pid: each for each in reader.collect(0.005)})
    return facts.keys() >= set(pids)


@pytest.mark.parametrize("name", ["cmdline", "environ", "maps"])
def test_a_hanging_read_costs_that_process_its_name_only(proc: FakeProc, name: str) -> None:
    """Others get their facts, the stuck one what can be had without it, and all when it comes back."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02)
    stuck, healthy = proc.add(42), proc.add(43)
    path = proc.hang(42, name)
    facts: dict[int, ProcessFacts] = {}
    reader.request(stuck)
    reader.request(healthy)
    wait_until(lambda: _collect(reader, facts, 42, 43))
    assert (facts[43].command, facts[43].denied) == ("train.py", ())
    assert (facts[42].command, facts[42].denied) == ("python3", ("cmdline", "environ", "maps"))
    assert reader.stuck == 1
    reader.request(stuck)  # its parent changed: it must not cost a second thread
    facts.clear()
    wait_until(lambda: _collect(reader, facts, 42))
    assert reader.stuck == 1
    facts.clear()
    late = {
        "cmdline": b"python3\0late.py\0",
        "environ": b"LOCAL_RANK=1\0",
        "maps": b"7f-8f r-xp 0 0:1 2 /x/libcuda.so.1\n",
    }
    path.write_bytes(late[name])
    wait_until(lambda: _collect(reader, facts, 42))
    assert facts[42].denied == ()
    assert (facts[42].command, facts[42].signs, facts[42].libraries) in {
        ("late.py", (), ()), ("train.py", ("LOCAL_RANK",), ()), ("train.py", (), ("libcuda",)),
    }  # fmt: skip
    assert reader.stuck == 0


def test_threads_lost_to_hanging_reads_are_few(proc: FakeProc) -> None:
    """However many reads hang, only a few threads are lost, and every process is answered."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02, most_stuck=2)
    pids = range(50, 56)
    facts: dict[int, ProcessFacts] = {}
    paths = []
    for pid in pids:
        row = proc.add(pid)
        paths.append(proc.hang(pid, "cmdline"))
        reader.request(row)
    wait_until(lambda: _collect(reader, facts, *pids))
    assert reader.stuck == 2
    assert all(each.denied == ("cmdline", "environ", "maps") for each in facts.values())
    for path in paths[:2]:
        path.write_bytes(b"x\0")
    wait_until(lambda: _collect(reader, facts) and reader.stuck == 0)


def test_threads_are_few_when_the_harmless_reads_hang_too() -> None:
    """However many harmless reads hang, no thread too many is lost, and all goes on when they return."""
    now = 0.0
    begun, gate = threading.Semaphore(0), threading.Event()

    def hang() -> str:
        begun.release()
        gate.wait()
        return "late"

    guard: Guard[str] = Guard(stuck_after=1.0, most_stuck=2, clock=lambda: now)
    others = threading.active_count()
    for key in range(10):
        guard.submit(key, hang, hang)
    for lost in (1, 2, 3):
        assert begun.acquire(timeout=20)
        now += 1.0
        assert guard.collect(0.0) == []
        assert guard.stuck == lost
    now += 1.0
    guard.submit("one more", hang, hang)
    assert guard.collect(0.0) == []
    assert (guard.stuck, guard.busy, threading.active_count() - others) == (3, False, 3)

    gate.set()
    done: list[str] = []

    def finished() -> bool:
        done.extend(guard.collect(0.005))
        return len(done) == 12  # the first task both ways, and the ten others

    wait_until(finished)
    assert guard.stuck == 0


def test_the_outline_never_asks_the_name_service(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory that is down (LDAP, SSSD) cannot hang the harmless read: it has known names only."""
    host = Host(proc.root)
    row = proc.add(42)
    root = pwd.getpwuid(0)
    asked: list[int] = []

    def ask(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return root

    monkeypatch.setattr(pwd, "getpwuid", ask)
    assert (known(host.outline(row)).user, asked) == ("0", [])
    assert (known(host.facts(row)).user, asked) == ("root", [0])
    assert (known(host.outline(row)).user, asked) == ("root", [0])


def test_processes_that_end_have_no_facts(proc: FakeProc) -> None:
    """A process that is gone when its turn comes is simply not answered."""
    reader = FactsReader(Host(proc.root))
    row = proc.add(42)
    (proc.root / "42/stat").unlink()
    reader.request(row)
    reader.request(proc.add(43))
    facts: dict[int, ProcessFacts] = {}
    wait_until(lambda: _collect(reader, facts, 43))
    assert set(facts) == {43}


# --- hidden holders -----------------------------------------------------------------------------------

HOLDER = """
import mmap, sys
kept = []
for path in sys.argv[1:]:
    file = open(path.rstrip("+"), "rb")
    kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.endswith("+") else file)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a directory with device files and the driver's libraries."""
    place = tmp_path / "dev"
    place.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "libcuda.so.580.1", "libnvidia-ml.so.1"):
        (place / name).write_bytes(bytes(mmap.PAGESIZE))
    return place


@pytest.fixture
def open_files(devices: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start programs that have files open, and end them behind the test."""
    with contextlib.ExitStack() as programs:

        def start(*names: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-I", "-c", HOLDER, *(str(devices / name) for name in names)]
            program = programs.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            programs.callback(program.kill)
            assert program.stdout is not None
            assert program.stdout.readline() == b"ready\n"
            return program

        yield start


def _complete(search: HiddenSearch, listed: set[int] | None = None) -> None:
    def complete() -> bool:
        search.step(listed or set(), 1.0)
        return search.complete

    wait_until(complete)


def _finish(search: HiddenSearch, listed: set[int] | None = None) -> tuple[HiddenHolder, ...]:
    _complete(search, listed)
    assert search.result is not None
    return search.result


def test_hidden_holders_are_found_and_told_apart(
    host: Host, devices: Path, open_files: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """CUDA programs, monitors and others with a device open are found; control files are no device."""
    cuda = open_files(
        "nvidia1+", "nvidia0", "nvidia1", "nvidiactl", "libnvidia-ml.so.1+", "libcuda.so.580.1+"
    )
    monitor = open_files("nvidia0", "nvidiactl+", "libnvidia-ml.so.1+", "libcuda.so.580.1+")
    other = open_files("nvidia1")
    open_files("nvidiactl+", "nvidia-uvm", "libcuda.so.580.1+")
    found = _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"))
    rows = {program.pid: host.row(program.pid) for program in (cuda, monitor, other)}
    assert [(each.pid, each.kind, each.minors) for each in found] == sorted(
        [(cuda.pid, "cuda", (0, 1)), (monitor.pid, "monitor", (0,)), (other.pid, "unknown", (1,))]
    )
    for each in found:
        row = rows[each.pid]
        assert row is not None
        assert each.start == row.start
        assert each.command.endswith(" -c")


def test_a_forked_worker_has_its_files_from_its_parent(
    host: Host, devices: Path, open_files: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """While NVML lists the parent, a child with the device open is told apart from a hidden holder."""
    holder = open_files("nvidia0+")

    (found,) = _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"), {os.getpid()})

    assert (found.pid, found.kind) == (holder.pid, "inherited")


def test_a_device_file_that_was_removed_is_still_held(
    host: Host, devices: Path, open_files: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """A driver that was reloaded leaves its old device files open in those who had them."""
    holder = open_files("nvidia0")
    (devices / "nvidia0").unlink()
    assert [each.pid for each in _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"))] == [holder.pid]


def test_listed_and_own_processes_are_not_hidden(
    host: Host, devices: Path, open_files: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """Who NVML lists is not hidden, from the moment on that it is listed; neither are we ourselves."""
    listed, own, later, ending = (open_files("nvidia0") for _ in range(4))
    search = HiddenSearch(host, {own.pid}, devices=f"{devices}/nvidia")
    assert {each.pid for each in _finish(search, {listed.pid})} == {later.pid, ending.pid}
    search.step({listed.pid, later.pid}, 1.0)
    assert {each.pid for each in search.result or ()} == {ending.pid}
    ending.kill()
    ending.wait()
    search.step({listed.pid, later.pid}, 1.0)
    assert search.result == ()


def test_a_step_keeps_its_budget_and_a_round_its_pause(proc: FakeProc) -> None:
    """A round is spread over steps; its result counts when it is complete; the next one waits."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001  # as if every look at a process took a millisecond
        return now

    for pid in range(100, 200):
        proc.add(pid)
        (proc.root / str(pid) / "fd").mkdir()
    holder = proc.root / "199/fd/5"
    holder.symlink_to("/dev/nvidia3")
    search = HiddenSearch(Host(proc.root), (), pause=30.0, clock=clock)
    steps = 0

    def found() -> bool:
        nonlocal steps
        search.step((), 0.010)
        steps += 1
        return search.result is not None

    wait_until(found)
    assert steps >= 8
    assert search.result is not None
    assert [each.minors for each in search.result] == [(3,)]
    holder.unlink()
    (proc.root / "150/fd/7").symlink_to("/dev/nvidia1")
    search.step((), 10.0)
    assert [each.pid for each in search.result] == [199]
    now += 30.0

    def found_again() -> bool:
        search.step((), 10.0)
        return [each.pid for each in search.result or ()] == [150]

    wait_until(found_again)


def test_a_hanging_look_is_given_up(proc: FakeProc) -> None:
    """A holder whose memory cannot be read is reported as unknown, and the round comes to its end."""
    now = 0.0
    proc.add(42, comm=b"stuck")
    (proc.root / "42/fd").mkdir()
    (proc.root / "42/fd/5").symlink_to("/dev/nvidia0")
    path = proc.hang(42, "maps")
    search = HiddenSearch(Host(proc.root), (), clock=lambda: now)

    def finished() -> bool:
        nonlocal now
        now += 1.0
        search.step((), 1.0)
        return search.result is not None

    wait_until(finished)
    assert search.result == (HiddenHolder(42, 500, "unknown", "stuck", "root", (0,)),)
    path.write_bytes(b"")  # let the thread go


@pytest.mark.usefixtures("as_nobody")
def test_not_being_allowed_to_look_is_not_nobody(host: Host) -> None:
    """Without privileges the search says how many processes it could not see into, and not "none hidden"."""
    search = HiddenSearch(host, ())
    _complete(search)
    assert search.unreadable > 1
    assert search.result is None


def test_a_proc_that_hides_processes_is_not_nobody(hidden_proc: Path) -> None:
    """Where proc shows no others' processes (hidepid), it is not known who holds a device."""
    search = HiddenSearch(Host(hidden_proc), ())
    os.seteuid(NOBODY)
    try:
        _complete(search)
    finally:
        os.seteuid(0)
    assert (search.result, search.unreadable > 0) == (None, True)


def test_what_is_found_counts_though_not_all_may_be_looked_into(proc: FakeProc) -> None:
    """A holder that is seen is known; when it has gone, nothing is known about the rest."""
    proc.add(42)
    (proc.root / "42/fd").mkdir()
    (proc.root / "42/fd/5").symlink_to("/dev/nvidia0")
    (proc.root / "1").rename(proc.root / "init")  # not shown
    search = HiddenSearch(Host(proc.root), ())
    assert [each.pid for each in _finish(search)] == [42]
    (proc.root / "42/stat").unlink()
    search.step((), 1.0)
    assert (search.result, search.unreadable) == (None, 1)
