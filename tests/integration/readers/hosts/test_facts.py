"""The facts that are read once for a process, its name, reads that hang, and what never leaves the reader."""

import os
import pwd
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.procs import FakeProc, known, stat_line
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import ProcessFacts, Rank
from vramledger.readers.collector import BoundedReader
from vramledger.readers.hosts.facts import ENVIRON_CAP
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.program_names import program_name, worker_evidence
from vramledger.sampling.holder_watch import FactsReader

SECRET = "hunter2"  # noqa: S105 what must never come out


def test_only_the_names_of_worker_variables_are_kept(proc: FakeProc) -> None:
    """Of an environment only the names that show a worker leave the reader, and no value."""
    filler = b"".join(b"SERVICE_%d=%b\0" % (n, b"x" * 100) for n in range(6000))
    environ = b"TOKEN=hunter2\0MY_LOCAL_RANK=1\0" + filler + b"LOCAL_RANK=hunter2\0PMIX_RANK=hunter2\0"
    facts = proc.facts(environ=environ)
    assert facts.signs == ("LOCAL_RANK", "PMIX_RANK")
    assert SECRET not in repr(facts)
    assert "SERVICE" not in repr(facts)


OVERWRITTEN = [b"\0" * 400, b" --lr=0.1\0" + b"\0" * 90, b"a long title", b"PATH=/bin\0" + b"\0" * 90]
"""What setproctitle leaves of an environment: zeros, and before them the end of a title that is long."""


KEPT = [b"", b"A=1\0", b"odd\0A=1\0", b"BASH_FUNC_x%%=() {  :\n}\0A=\0"]
"""Ordinary ones: one without bytes is known to be empty, and odd words do not make a title."""


@pytest.mark.parametrize(
    ("environ", "whole"), [*((each, True) for each in KEPT), *((each, False) for each in OVERWRITTEN)]
)
def test_an_environment_under_a_title_is_not_known(proc: FakeProc, environ: bytes, whole: bool) -> None:
    """A program that sets its title has overwritten its environment: it is not known, and not empty."""
    facts = proc.facts(environ=environ)
    assert (facts.signs, facts.rank, facts.denied) == ((), None, () if whole else ("environ",))
    assert Host(proc.root).variables(42, frozenset({"SLURM_JOB_ID"})) == ({} if whole else None)


def test_a_process_that_sets_its_title_has_no_environment(host: Host) -> None:
    """A real process that overwrites its environment, as setproctitle does, has none that is known."""
    code = (
        "import ctypes, sys; print(flush=True); sys.stdin.readline();"
        "begin, end = map(int, open('/proc/self/stat').read().rpartition(')')[2].split()[47:49]);"
        "ctypes.memset(begin, 0, end - begin); print(flush=True); sys.stdin.readline()"
    )
    environ = {**os.environ, "LOCAL_RANK": "1"}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True, bufsize=1) as child:
        seen = []
        for _ in range(2):
            sure(child.stdout).readline()
            seen.append(known(host.facts(sure(host.row(child.pid)))))
            sure(child.stdin).write("\n")
    assert [(each.signs, each.denied) for each in seen] == [(("LOCAL_RANK",), ()), ((), ("environ",))]


SHORT, LONG = (b"FILLER=" + b"x" * length + b"\0LOCAL_RANK=0\0" for length in (1000, ENVIRON_CAP))


@pytest.mark.parametrize(("environ", "signs"), [(SHORT, ("LOCAL_RANK",)), (LONG, None), (b"\0" * 90, None)])
def test_a_parents_environment(proc: FakeProc, environ: bytes, signs: tuple[str, ...] | None) -> None:
    """What a parent may have passed on is known only when its environment was read whole, and is one."""
    proc.add(40, environ=environ)
    assert sure(proc.facts(ppid=40, environ=b"LOCAL_RANK=0\0").parent).signs == signs


def test_the_program_of_a_parent_is_its_file(proc: FakeProc) -> None:
    """A parent's user and its program's file are the kernel's words, whatever it calls itself."""
    proc.add(40, comm=b"fake", cmdline=b"nvidia-cuda-mps-control\0")
    parent = sure(proc.facts(ppid=40).parent)
    assert (parent.uid, parent.user, parent.program) == (0, "root", "")
    for target in ("/usr/bin/sudo", "/usr/bin/sudo (deleted)"):
        (proc.root / "40/exe").unlink(missing_ok=True)
        (proc.root / "40/exe").symlink_to(target)
        parent = sure(proc.facts(ppid=40).parent)
        assert (parent.command, parent.program) == ("nvidia-cuda-mps-control", "sudo")


@pytest.mark.parametrize(
    ("value", "nspid", "expected"),
    [(b"42", b"42", True), (b"41", b"42", False), (b"7", b"42 7", True), (b"", b"42", False),
     (b"x", b"42", False)],
)  # fmt: skip
def test_systemd_names_a_main_process(proc: FakeProc, value: bytes, nspid: bytes, expected: bool) -> None:
    """Children inherit the variable with their parent's pid; a container's systemd uses its own pids."""
    files = {"environ": b"SYSTEMD_EXEC_PID=" + value + b"\0A=b\0", "status": b"NSpid:\t" + nspid + b"\n"}
    assert proc.facts(**files).service_main is expected


@pytest.mark.parametrize(
    ("comm", "environ", "session", "cgroup", "expected"),
    [
        (b"systemd", b"", 42, "/system.slice/train.service", True),
        (b"systemd", b"", 42, "/user.slice/user-7.slice/user@7.service/app.slice/train.service", True),
        (b"systemd", b"SYSTEMD_EXEC_PID=41\0", 42, "/system.slice/train.service", False),  # it says who
        (b"systemd", b"", 41, "/system.slice/train.service", False),  # a worker of it
        (b"python3", b"", 42, "/system.slice/train.service", True),  # no name decides
        (b"systemd", b"", 42, "/user.slice/user-7.slice/session-3.scope", False),
        (b"systemd", b"", 42, "/user.slice/user-7.slice/user@7.service/init.scope", False),
        (b"systemd", b"", 42, "/system.slice/ssh.service", False),  # somebody's program
    ],
)
def test_an_old_systemd_does_not_say_who_its_service_is(  # noqa: PLR0913, PLR0917 what it depends on
    proc: FakeProc, comm: bytes, environ: bytes, session: int, cgroup: str, expected: bool
) -> None:
    """Before version 248 who leads a session below systemd in a service's cgroup may be its main process."""
    proc.add(40, comm=comm)
    row = proc.add(42, ppid=40, environ=environ)._replace(session=session)
    (proc.root / "42/cgroup").write_text(f"0::{cgroup}\n")
    facts = known(Host(proc.root).facts(row))
    assert (facts.service_main, facts.may_be_service_main) == (False, expected)


def test_ignored_signals_come_from_the_mask(proc: FakeProc) -> None:
    """HUP, INT and QUIT are named; other ignored signals (SIGPIPE here) are not."""
    assert proc.facts(status=b"SigIgn:\t0000000000001005\n").ignores == ("HUP", "QUIT")


def test_facts_of_another_process_with_the_pid_are_dropped(proc: FakeProc) -> None:
    """When the pid was reused between row and facts, there are no facts."""
    row = proc.add(42, start=500)
    proc.add(42, start=900)
    host = Host(proc.root)
    assert (host.facts(row), host.basic_facts(row)) == (None, None)


def test_facts_tell_of_the_parent_of_now(proc: FakeProc) -> None:
    """When the parent ended between row and facts, the facts have the process that adopted the child."""
    proc.add(41, comm=b"launcher", start=400)
    row = proc.add(42, ppid=41)
    proc.add(42, ppid=1)
    parent = sure(known(Host(proc.root).facts(row)).parent)
    assert (parent.pid, parent.comm) == (1, "systemd")


@pytest.mark.parametrize("ppid", [0, 999, 41], ids=["outside our PID namespace", "ended", "younger"])
def test_a_parent_that_is_not_there_is_none(proc: FakeProc, ppid: int) -> None:
    """Who is not there is no parent, nor is who started after the child, with the pid of the real one."""
    proc.add(41, start=600)
    assert proc.facts(ppid=ppid, start=500).parent is None


@pytest.mark.parametrize(
    ("pgrp", "state", "expected"),
    [(42, b"S", True), (40, b"S", True), (40, b"Z", False), (39, b"S", False), (0, b"S", None)],
)
def test_the_groups_leader_may_live(proc: FakeProc, pgrp: int, state: bytes, expected: bool | None) -> None:
    """A leader that is a zombie or missing is dead; one outside our namespace is not known."""
    proc.add(40)
    proc.stat(40).write_bytes(stat_line(40).replace(b") S ", b") " + state + b" "))
    assert proc.facts(pgrp=pgrp).leader_alive is expected


def test_users_have_the_names_of_the_host(proc: FakeProc, tmp_path: Path) -> None:
    """With a root file system, names come from its list; a user without a name is a number."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_bytes(
        b"root:x:0:0::/:/bin/sh\ntoor:x:0:0::/:/bin/sh\nada:x:1001:1001::/:/bin/sh\n"
    )
    host = Host(proc.root, tmp_path)
    rows = [proc.add(50 + n, status=b"Uid:\t%d\t0\t0\t0\n" % uid) for n, uid in enumerate((0, 1001, 4242))]
    assert [known(host.facts(row)).user for row in rows] == ["root", "ada", "4242"]


@pytest.mark.usefixtures("as_nobody")
def test_what_is_denied_is_named(host: Host) -> None:
    """Without privileges another user's process has its public facts; the others are named as denied."""
    facts = known(host.facts(sure(host.row(1))))
    assert (facts.uid, facts.denied, facts.libraries) == (0, ("environ", "maps"), None)
    assert facts.command
    assert facts.cgroup is not None


MAPPED = b"7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/x86_64-linux-gnu/libcuda.so.580.159\n"
ORDINARY = b"7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/python3/site-packages/nvidia/cudnn/lib/libcudnn.so.9\n"


@pytest.mark.parametrize(
    ("maps", "files", "expected"),
    [
        (MAPPED, (), True),
        (b"7f00-7f01 rw-s 00000000 00:05 1 /dev/nvidia0\n", (), True),
        (b"7f00-7f01 r-xp 00000000 08:01 1 /usr/lib/libcuda.so.1 (deleted)\n", (), True),
        (ORDINARY, ("/dev/nvidia0",), True),
        (ORDINARY, ("/dev/nvidiactl",), True),
        (ORDINARY, ("/dev/dri/renderD128",), True),
        (ORDINARY, ("/dev/dxg",), True),
        (ORDINARY, ("/dev/null", "/home/ada/nvidia0"), False),
        (ORDINARY, (), False),
        (ORDINARY, None, None),
        (b"", (), None),
    ],
)
def test_a_process_without_device_and_library_uses_no_gpu(
    proc: FakeProc, maps: bytes, files: tuple[str, ...] | None, expected: bool | None
) -> None:
    """Mappings or open files show a GPU's user; without mappings it exits, without files it hides them."""
    proc.add(42)
    if files is not None:
        proc.hold(42, *files)
    assert proc.facts(maps=maps).uses_gpu is expected


def test_a_rank_comes_from_the_environment(proc: FakeProc) -> None:
    """A rank is read with the other facts; where the environment may not be read, none is known."""
    environ = b"MASTER_ADDR=n0\0MASTER_PORT=29500\0RANK=3\0WORLD_SIZE=8\0"
    assert [proc.facts(environ=each).rank for each in (environ, b"")] == [Rank(3, 8, "n0:29500"), None]


def _collected(reader: FactsReader, *pids: int) -> dict[int, ProcessFacts]:
    """Return the facts by pid as soon as there are those of these processes."""
    facts: dict[int, ProcessFacts] = {}

    def arrived() -> bool:
        facts.update({each.pid: each for each in reader.collect(0.005)})
        return facts.keys() >= set(pids)

    wait_until(arrived, "the facts")
    return facts


@pytest.mark.parametrize("name", ["cmdline", "environ", "maps"])
def test_a_hanging_read_costs_that_process_its_name_only(proc: FakeProc, name: str) -> None:
    """Other processes get all facts, the stuck one gets what cannot hang, and all when its read returns."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02)
    stuck, healthy = proc.add(42), proc.add(43)
    path = proc.hang(42, name)
    reader.request(stuck)
    reader.request(healthy)
    facts = _collected(reader, 42, 43)
    assert (facts[43].command, facts[43].denied) == ("train.py", ())
    assert (facts[42].command, facts[42].denied) == ("python3", ("cmdline", "environ", "maps"))
    assert reader.stuck == 1
    reader.request(stuck)  # its parent has changed: it must not block a second thread
    _collected(reader, 42)
    assert reader.stuck == 1
    mapped = b"7f-8f r-xp 0 0:1 2 /x/libcuda.so.1\n"
    late = {"cmdline": b"python3\0late.py\0", "environ": b"LOCAL_RANK=1\0", "maps": mapped}
    path.write_bytes(late[name])
    found = _collected(reader, 42)[42]
    assert found.denied == ()
    assert (found.command, found.signs, found.libraries) in {
        ("late.py", (), ()), ("train.py", ("LOCAL_RANK",), ()), ("train.py", (), ("libcuda",)),
    }  # fmt: skip
    assert reader.stuck == 0


def test_threads_lost_to_hanging_reads_are_few(proc: FakeProc) -> None:
    """Only a few threads are lost, however many reads hang, and every process is answered."""
    reader = FactsReader(Host(proc.root), stuck_after=0.02, max_stuck=2)
    pids, paths = range(50, 56), []
    for pid in pids:
        row = proc.add(pid)
        paths.append(proc.hang(pid, "cmdline"))
        reader.request(row)
    facts = _collected(reader, *pids)
    assert reader.stuck == 2
    assert all(each.denied == ("cmdline", "environ", "maps") for each in facts.values())
    for path in paths[:2]:
        path.write_bytes(b"x\0")
    wait_until(lambda: reader.collect(0.005) is not None and reader.stuck == 0, "the lost threads")


def test_threads_are_few_when_the_harmless_reads_hang_too() -> None:
    """If the reads that should not hang do, no more threads are lost, and all continues afterwards."""
    now = 0.0
    begun, gate = threading.Semaphore(0), threading.Event()

    def hang() -> str:
        begun.release()
        gate.wait()
        return "late"

    guard: BoundedReader[str] = BoundedReader(stuck_after=1.0, max_stuck=2, clock=lambda: now)
    others = threading.active_count()
    for key in range(10):
        guard.submit(key, hang, hang)
    for lost in (1, 2, 3):
        assert begun.acquire(timeout=20)
        now += 1.0
        assert (guard.collect(0.0), guard.stuck) == ([], lost)
    now += 1.0
    guard.submit("one more", hang, hang)
    assert guard.collect(0.0) == []
    assert (guard.stuck, guard.busy, threading.active_count() - others) == (3, False, 3)
    gate.set()
    done: list[str] = []

    def finished() -> bool:
        done.extend(guard.collect(0.005))
        return len(done) == 12  # the first task both ways, and the ten others

    wait_until(finished, "what was asked for")
    assert guard.stuck == 0


def test_the_outline_never_asks_the_name_service(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory service that is down (LDAP, SSSD) cannot hang the basic read: it uses known names."""
    host, row, root = Host(proc.root), proc.add(42), pwd.getpwuid(0)
    asked: list[int] = []

    def ask(uid: int) -> pwd.struct_passwd:
        asked.append(uid)
        return root

    monkeypatch.setattr(pwd, "getpwuid", ask)
    assert (known(host.basic_facts(row)).user, asked) == ("0", [])
    assert (known(host.facts(row)).user, asked) == ("root", [0])
    assert (known(host.basic_facts(row)).user, asked) == ("root", [0])


def test_processes_that_end_have_no_facts(proc: FakeProc) -> None:
    """A process that has ended before its turn gets no answer."""
    reader = FactsReader(Host(proc.root))
    row = proc.add(42)
    proc.stat(42).unlink()
    reader.request(row)
    reader.request(proc.add(43))
    assert set(_collected(reader, 43)) == {43}


NAMES: list[tuple[str, str, str]] = [
    ("python train.py --token hunter2", "python", "train.py"),
    ("/usr/bin/python3.11 -u -X dev -W error /srv/jobs/train.py hunter2", "python3", "train.py"),
    ("python -Wignore -OO train.py", "python", "train.py"),
    ("python -m torch.distributed.run --nproc 2 train.py", "python", "torch.distributed.run"),
    ("python -um pkg.main hunter2", "python", "pkg.main"),
    ("python3 -c hunter2", "python3", "python3 -c"),
    ("python -Ic hunter2 hunter2", "python", "python -c"),
    ("python -chunter2", "python", "python -c"),
    ("python", "python", "python"),
    ("python -", "python", "python"),
    ("python -- train.py", "python", "train.py"),
    ("python --unknown hunter2", "python", "python"),
    ("python --check-hash-based-pycs always train.py", "python", "train.py"),
    ("python app/ hunter2", "python", "app"),
    ("pypy3 bench.py", "pypy3", "bench.py"),
    ("/venv/bin/python3 /venv/bin/torchrun --nproc-per-node 2 train.py", "torchrun", "torchrun"),
    ("bash -c hunter2", "bash", "bash"),
    ("/bin/sh ./run-all.sh hunter2", "run-all.sh", "sh"),
    ("-bash", "bash", "bash"),
    ("perl -I lib -w script.pl hunter2", "perl", "script.pl"),
    ("perl -ne hunter2 file", "perl", "perl -e"),
    ("ruby -r json tool.rb hunter2", "ruby", "tool.rb"),
    ("node --max-old-space-size=4096 --require hunter2 server.js", "node", "server.js"),
    ("node --no-such-option hunter2", "node", "node"),
    ("node -e hunter2", "node", "node -e"),
    ("java -Xmx4g -Dkey=hunter2 -jar /opt/app/serve.jar hunter2", "java", "serve.jar"),
    ("java -cp hunter2 org.example.Main hunter2", "java", "org.example.Main"),
    ("java --add-opens java.base/java.lang=ALL-UNNAMED -m mod/org.example.Main", "java", "org.example.Main"),
    ("java --no-such hunter2", "java", "java"),
    ("julia -t 8 -O3 --project=/srv fit.jl hunter2", "julia", "fit.jl"),
    ("/usr/lib/R/bin/exec/R --no-echo --no-restore --file=fit.R --args hunter2", "R", "fit.R"),
    ("R hunter2", "R", "R"),
    ("Rscript --vanilla fit.R hunter2", "Rscript", "fit.R"),
    ("/opt/bin/vectoradd hunter2", "vectoradd", "vectoradd"),
]


@pytest.mark.parametrize(
    ("argv", "comm", "name"),
    [
        *((line.split(" "), comm, name) for line, comm, name in NAMES),
        (["VLLM::EngineCore"], "VLLM::EngineCor", "VLLM::EngineCore"),
        (["VLLM::EngineCore --key hunter2"], "VLLM::EngineCor", "VLLM::EngineCore"),
        (["ray::train()"], "ray::train()", "ray::train()"),
        (["nginx: worker process"], "nginx", "nginx"),
        (["sshd: user [priv]", "", ""], "sshd", "sshd"),
        (["/opt/My Program/bin/My Render"], "My Render", "My Render"),
        (["/usr/bin/python3 train.py hunter2"], "python3", "python3"),
        (["   "], "odd", "odd"),
        ([], "kworker/0:1", "kworker/0:1"),
        (["", "hunter2"], "odd", "odd"),
        (["evil\x1b[2J\n\udc80name"], "evil", "evil\ufffd[2J\ufffd\ufffdname"),
        (["x" * 100], "x" * 15, "x" * 64),
    ],
)
def test_a_program_has_its_own_name_and_no_argument(argv: list[str], comm: str, name: str) -> None:
    """A program has the name of its script, module or file, or of its title the first word, in plain text."""
    assert program_name(argv, comm) == name
    assert SECRET not in name


SPAWN = "multiprocessing.spawn"
WORKERS: list[tuple[str, str, str]] = [
    (f"python -c 'from {SPAWN} import spawn_main; spawn_main(tracker_fd=5)' --multiprocessing-fork",
     SPAWN, "multiprocessing"),
    ("python3 -s -c 'from multiprocessing.forkserver import main; main(5, 6, [__main__])'",
     "multiprocessing.forkserver", "multiprocessing"),
    ("python3.14 -c 'import sys; from multiprocessing.forkserver import main; main(5, 6)' x",
     "multiprocessing.forkserver", "multiprocessing"),
    ("python3 -c 'from multiprocessing.resource_tracker import main;main(5)'",
     "multiprocessing.resource_tracker", "multiprocessing"),
    ("python -m joblib.externals.loky.backend.popen_loky_posix --pipe 5",
     "joblib.externals.loky.backend.popen_loky_posix", "multiprocessing"),
    ("VLLM::Worker_TP0", "VLLM::Worker_TP0", "title"),
    ("sglang::scheduler_TP1", "sglang::scheduler_TP1", "title"),
    ("VLLM::APIServer", "VLLM::APIServer", ""),
    ("python -c 'import multiprocessing; hunter2'", "python -c", ""),
    (f"python train.py 'from {SPAWN} import spawn_main'", "train.py", ""),
]  # fmt: skip


@pytest.mark.parametrize(("line", "name", "sign"), WORKERS)
def test_a_worker_is_known_by_its_command(line: str, name: str, sign: str) -> None:
    """Only a child that multiprocessing or a serving framework started has this worker evidence."""
    argv = shlex.split(line)
    assert (program_name(argv, "python"), worker_evidence(argv)) == (name, (sign,) if sign else ())


@given(st.lists(st.text()), st.text(max_size=15))
def test_every_command_line_has_a_printable_name(argv: list[str], comm: str) -> None:
    """No command line raises, and every name is printable and short."""
    name = program_name(argv, comm)
    assert len(name) <= 64
    assert name.isprintable()
