"""A program is the same with the agent and without it: it runs both ways, and what it can say is compared.

What must differ is named in ``exporter/docs/AGENT.md`` under "What a program can notice".
"""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.listening import FAKE, PROJECT

REPORT = [
    "/bin/cat",
    *(
        f"/proc/self/{name}"
        for name in "status limits oom_score_adj coredump_filter personality cgroup fdinfo/0 fdinfo/1"
        " fdinfo/2 fdinfo/7 environ stat".split()
    ),
]
"""A program that says what the kernel knows of it, and that changes none of it."""

OTHER_EACH_TIME = re.compile(
    rb"(ino|Name|Pid|Tgid|Ngid|NStgid|NSpid|NSpgid|Vm.*|Rss.*|Hugetlb.*|SigQ|.*ctxt.*):"
)
"""Lines that say nothing of the starter."""

CALLER = """
import os, resource, signal, sys
for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python's own
    signal.signal(number, signal.SIG_DFL)
{state}
os.execve(sys.argv[1], sys.argv[1:], environ if "environ" in globals() else os.environ)
"""

STATES = {
    "plain": "",
    "ignored as systemd ignores": "signal.signal(signal.SIGPIPE, signal.SIG_IGN)",
    "every signal ignored": """
for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, signal.SIG_IGN)""",
    "every other signal ignored": """
for number in set(range(1, 64, 2)) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, 32, 33}:
    signal.signal(number, signal.SIG_IGN)""",
    "blocked signals": """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE])""",
    "nice, umask, limits": """
os.nice(3)
os.umask(0o027)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
open("/proc/self/oom_score_adj", "w").write("321")""",
    "a session, a directory, a descriptor": """
os.chdir("/usr")
os.dup2(os.open("/dev/null", os.O_RDONLY), 7)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))""",
    "closed input": "os.close(0)",
    "closed errors": "os.close(2)",
    "another Python's variables": """
names = "HOME PLATLIBDIR PATH MALLOC VERBOSE INSPECT STARTUP WARNINGS UTF8 IOENCODING HASHSEED DEVMODE"
names += " USERBASE PROFILEIMPORTTIME SAFEPATH PYCACHEPREFIX TRACEMALLOC FAULTHANDLER COERCECLOCALE _ANYTHING"
environ = {**os.environ, **{"PYTHON" + name: "/nowhere" for name in names.split()}}""",
    "no locale": """
environ = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG"))}""",
    "names that shells do not know": r"""
environ = {b"PATH": os.environb[b"PATH"], b"a.b": b"1", b"BASH_FUNC_f%%": b"() { :;\n}", b"Z": b"",
    b"_": b"x", b"\xff\xfe": b"\x80'\"$x`\\", b"SHLVL": b"7", b"PWD": b"/elsewhere", b"IFS": b"/",
    b"ENV": b"/nowhere"}""",
    "an empty environment": "environ = {}",
    "a large environment": """
environ = {**os.environ, **{"LARGE%d" % number: "x" * 1000 for number in range(80)}}""",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ``vramledger-agent`` as pip installs it, beside Python's program and ``vramledger``."""
    directory = tmp_path_factory.mktemp("bin")
    for name in ("vramledger", "vramledger-agent"):
        program = directory / f"{name}-python"
        begin = f"from {name.replace('-', '_')}.cli import main"
        program.write_text(f"#!{sys.executable}\nimport sys\n{begin}\nsys.exit(main())\n")
        program.chmod(0o755)
        shutil.copy(PROJECT / "exporter" / "agent" / "vramledger.sh", directory / name)
    return directory / "vramledger-agent"


class Ended(NamedTuple):
    """How a program ended, and what it wrote."""

    status: int
    out: list[bytes]
    errors: bytes


def ended(command: list[str], environ: dict[str, str] | None = None, place: Path | None = None) -> Ended:
    done = subprocess.run(
        command, env=environ, cwd=place, stdin=subprocess.DEVNULL, capture_output=True, check=False,
        timeout=60,
    )  # fmt: skip
    return Ended(done.returncode, done.stdout.split(b"\n"), done.stderr)


def without_inherent(lines: list[bytes]) -> list[bytes]:
    """Leave out the variables that tell every Python of a program of the agent."""
    return [line for line in lines if not line.startswith((b"PYTHONPATH=", b"VRAMLEDGER_AGENT"))]


def facts(lines: list[bytes]) -> list[bytes]:
    """Return what the starter decides, of a report."""
    *lines, last, _ = lines
    environment, _, stat = last.rpartition(b"\0")
    fields = stat.rpartition(b")")[2].split()
    told = [line for line in lines if not OTHER_EACH_TIME.match(line)]
    # The group's and session's numbers are those of each caller, of which each is a process of its own.
    return [*told, *filter(None, environment.split(b"\0")), fields[4], *fields[15:17], *fields[38:40]]


@pytest.mark.repeats(kept=len(STATES))
@pytest.mark.parametrize("state", STATES)
def test_what_a_program_inherits(state: str, run: Path) -> None:
    """Signals, masks, limits, descriptors, scheduling and environment are those of the caller."""
    caller = [sys.executable, "-c", CALLER.format(state=STATES[state])]
    without = ended([*caller, *REPORT])
    inside = ended([*caller, str(run), "run", "--", *REPORT])
    assert without_inherent(facts(inside.out)) == without_inherent(facts(without.out))
    assert (inside.status, inside.errors) == (without.status, without.errors)
    assert facts(inside.out) != facts(without.out), "the agent's variables are there"


def test_directory_session_and_arguments(run: Path, tmp_path: Path) -> None:
    """The working directory, the session and every argument are those that the caller gave."""
    state = f"os.setsid(); os.chdir({str(tmp_path)!r})"
    code = """pwd -P; ps -o sid=,pgid=,pid= -p $$ | tr -s " 0-9" "=" ; printf "%s|" "$0" "$@" """
    program = ["/bin/sh", "-c", code, "an argument", "", "*", "-x", "--", "\n", "\udcff"]
    caller = [sys.executable, "-c", CALLER.format(state=state)]
    assert ended([*caller, str(run), "run", "--", *program]) == ended([*caller, *program])


def test_a_program_dies_of_a_closed_pipe_and_of_a_limit(run: Path) -> None:
    """What Python ignores ends the program, or does not, as its caller said."""
    for code, status in (
        ("{} yes | head -n 1; exit ${{PIPESTATUS[0]}}", 141),
        ("ulimit -f 1; {} head -c 99999 /dev/zero >/dev/shm/vl-$$; echo $?; rm /dev/shm/vl-$$", 0),
        ("trap '' PIPE; {} yes 2>/dev/null | head -n 1; exit ${{PIPESTATUS[0]}}", 1),
        ("{} bash -c 'trap \"echo caught >&2\" PIPE; kill -PIPE $$'", 0),
    ):
        texts = [code.format(word) for word in ("command", f"{run} run --")]
        without, inside = (ended(["bash", "-c", text]) for text in texts)
        assert inside[:2] == without[:2], code  # bash names the command in an error
        assert without.status == status, code


def test_what_the_shell_would_have_started(run: Path, tmp_path: Path) -> None:
    """A script without a first line runs, and what cannot be started ends with the shell's status."""
    script = tmp_path / "script"
    script.write_text('echo "$1" and "$#"\n')
    (tmp_path / "plain").write_text("")
    script.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for command, status in (
        ([str(script), "a b", "c"], 0),
        (["script", "x"], 0),
        (["no-such-program"], 127),
        ([str(tmp_path / "plain")], 126),
        ([str(tmp_path)], 126),
        (["a=b"], 127),
        (["sh", "-c", "exit 7"], 7),
    ):
        inside = ended([str(run), "run", "--", *command], path)
        shell = ended(["bash", "-c", '"$@"', "bash", *command], path)
        assert (inside.status, inside.out) == (shell.status, shell.out), command
        assert inside.status == status
    missing = b"vramledger-agent: no-such-program: there is no such program\n"
    assert ended([str(run), "run", "--", "no-such-program"], path).errors == missing


def test_the_directory_and_the_users_start_up_files_are_the_programs(run: Path, tmp_path: Path) -> None:
    """Modules in the working directory do not stop ``run``, and the program's start-up code runs once."""
    for name in ("argparse", "enum", "os", "site", "vramledger_agent", "re", "encodings", "abc"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('theirs')\n")
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "sitecustomize.py").write_text("open('count', 'a').write('x')\nprint('theirs')\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
    for command in (["sh", "-c", "echo started"], [sys.executable, "-I", "-c", "print('started')"]):
        assert ended([str(run), "run", "--", *command], environ, tmp_path) == (0, [b"started", b""], b"")
    assert not (tmp_path / "count").exists()
    program = [sys.executable, str(tmp_path / "path" / "sitecustomize.py")]
    assert ended([str(run), "run", "--", *program], environ, tmp_path).out == [b"theirs", b"theirs", b""]
    assert (tmp_path / "count").read_text() == "xx"  # as sitecustomize, and as the program itself


@pytest.mark.parametrize("name", ["vramledger-agent", pytest.param("vramledger", marks=pytest.mark.both)])
def test_run_through_a_link(name: str, run: Path, tmp_path: Path) -> None:
    """A link to the script finds Python's program beside the script; other commands and help are Python's."""
    program, link = run.with_name(name), tmp_path / "linked"
    module = name.replace("-", "_")
    link.symlink_to(program)
    assert ended([str(link), "run", "--", "echo", "it"]).out == [b"it", b""]
    assert ended([str(link), "--version"]) == ended([sys.executable, "-m", module, "--version"])
    assert ended([str(link), "run", "--help"]) == ended([sys.executable, "-m", module, "run", "--help"])
    assert f"usage: {name} run".encode() in ended([str(link), "run", "--help"]).out[0]
    assert ended([str(link), "run", "--no-such-flag", "x"]).status == 2
    assert program.stat().st_mode & stat.S_IXUSR


WAIT = """
import os, sys, time
import torch
kept = torch.Tensor(8)
if os.environ.get("VRAMLEDGER_AGENT") == "1":
    while len(os.listdir("/proc/self/task")) < 2:
        time.sleep(0.01)
"""
"""A program with a framework; it goes on when the agent's thread is there."""

ADDRESS = re.compile(rb" at 0x[0-9a-f]+")

PROGRAMS = {
    "hooks": """
import asyncio, atexit, builtins, faulthandler, gc, logging, signal, sys, threading, warnings
{framework}
for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook"):
    print(name, getattr(sys, name) is getattr(sys, f"__{{name}}__"))
print(threading.excepthook is threading.__excepthook__, [each.name for each in threading.enumerate()])
print(sys.gettrace(), sys.getprofile(), threading._trace_hook, threading._profile_hook)
print(sys.get_asyncgen_hooks(), sys.get_coroutine_origin_tracking_depth(), sys.getswitchinterval())
print(gc.callbacks, gc.get_threshold(), gc.isenabled(), gc.get_debug(), gc.garbage, gc.get_freeze_count())
print(warnings.filters, warnings.showwarning.__module__, faulthandler.is_enabled(), sys.getrecursionlimit())
print({{int(number): signal.getsignal(number) for number in signal.valid_signals()}})
print(signal.pthread_sigmask(0, []), signal.getitimer(0), signal.getitimer(1), signal.set_wakeup_fd(-1))
print(logging.root.handlers)
print(sys.path, sys.argv, sys.flags, [each.__name__ for each in sys.path_hooks])
print(sys.warnoptions, sys._xoptions)
print([each for each in sys.path_importer_cache if not each.startswith(sys.base_prefix)], len(vars(builtins)))
print( "sitecustomize" in sys.modules, sys.dont_write_bytecode)
ours = ("ImportHook", "_FrameworkFinder")
print([str(each).split(" at ")[0] for each in sys.meta_path if type(each).__name__ not in ours])
""",
    "descriptors and children": """
import os, subprocess, sys
{framework}
# What the agent opens for a moment, while it looks for its exporter, is not there each time.
opened = (sorted(map(int, os.listdir("/proc/self/fd")))[:-1] for _ in range(99))
print(min(opened, key=len), os.getcwd(), os.umask(0), os.nice(0))
lines = open("/proc/self/status").read().splitlines()  # without the C library's own signals of threads
signals = [line.split() for line in lines if line[:6] in ("SigIgn", "SigCgt", "SigBlk")]
print([int(mask, 16) & 0x7fffffff for _, mask in signals])
code = "import sys; print(sys.path, sys.flags)"
print(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
print(os.listdir("."))
""",
    "a finder that is put in front and taken out": """
import sys
class Own:
    def find_spec(self, name, path=None, target=None): return None
sys.meta_path.insert(0, Own())
{framework}
print(sys.meta_path.pop(0))
""".replace("pop(0)", "pop(0).__class__.__name__"),
    "what is called, and where": """
import os, sys, trace, threading
files = set()
def note(frame, event, arg):
    name = frame.f_code.co_filename
    # As coverage and others: the standard library's files, and those of packages, are not the program's.
    if not name.startswith(("<", os.path.dirname(os.__file__))) and "-packages" not in name:
        files.add(name)
    return note
sys.settrace(note)
threading.settrace(note)
sys.setprofile(note)
{framework}
import colorsys
optimizer = torch.optim.SGD([kept]) if "torch" in globals() and hasattr(torch.optim, "SGD") else None
sys.settrace(None); sys.setprofile(None)
print(sorted(files))
""",
    "forks of several threads": """
import os, sys, threading, warnings
warnings.simplefilter("ignore")
sys.unraisablehook = lambda each: print("unraisable", each.exc_value)
{framework}
def fork():
    for _ in range(25):
        pid = os.fork()
        if pid == 0: os._exit(0)
        os.waitpid(pid, 0)
threads = [threading.Thread(target=fork) for _ in range(6)]
for each in threads: each.start()
for each in threads: each.join()
print("forked")
""",
    "forks with a warning for each": """
import os, warnings
warnings.simplefilter("error")
{framework}
for _ in range(20):
    pid = os.fork()
    if pid == 0: os._exit(0)
    os.waitpid(pid, 0)
""",
    "an error in every place": """
import atexit, sys, threading
{framework}
@atexit.register
def last(): raise ValueError("at exit")
class Ends:
    def __del__(self): raise ValueError("in del")
Ends()
thread = threading.Thread(target=lambda: 1 / 0, name="its name"); thread.start(); thread.join()
import no_such_module
""",
    "an exit with words": "{framework}\nimport sys; sys.exit('words')",
    "an interrupt": "{framework}\nimport signal; signal.raise_signal(signal.SIGINT)",
    "an end by a signal": "{framework}\nimport os; os.kill(os.getpid(), 15)",
    "a closed output": "{framework}\nimport os; os.close(1); print('x')",
    "an event loop and processes": """
import asyncio, multiprocessing, sys
{framework}
async def main():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "print('child')")
    return await process.wait()
if __name__ == "__main__":
    print(asyncio.run(main()))
    with multiprocessing.get_context("forkserver").Pool(1) as pool: print(pool.map(abs, [-1]))
""",
}

ALONE = {
    "a framework that is looked for": """
import ctypes, importlib.util, os, sys
try:
    import vramledger_agent.frameworks.provider as devices
    devices.has_device_files = lambda *_: True
except ImportError: pass
print(importlib.util.find_spec("cupy"), importlib.util.find_spec("rmm"))
try: import cupy
except ImportError: pass
import colorsys, mailbox
print(len(os.listdir("/proc/self/task")), ctypes.CDLL(None).unshare(0x10000000))
""",
    "every module": """
import sys
for name in ("cupy", "rmm"):
    try: __import__(name)
    except ImportError: pass
import colorsys
print(sorted(sys.modules), sum(type(each).__name__ != "_FrameworkFinder" for each in sys.meta_path))
""",
    "a hidden start-up file": "import sitecustomize; print(sitecustomize.__file__)",
    "lines that trace counts": """
import sys, trace
tracer = trace.Trace(count=1, trace=0)
tracer.runfunc(lambda: __import__("colorsys"))
print(sorted({name for name, _ in tracer.results().counts if not tracer.results().is_ignored_filename(name)}))
""",
}


@pytest.mark.repeats(kept=len(PROGRAMS) + len(ALONE))
@pytest.mark.parametrize("name", [*PROGRAMS, *ALONE])
def test_what_a_python_program_can_say(name: str, run: Path, tmp_path: Path) -> None:
    """Output, errors and status are the same to the byte, with a framework and without one."""
    code = PROGRAMS[name].format(framework=WAIT) if name in PROGRAMS else ALONE[name]
    program = tmp_path / "program.py"
    program.write_text(code)
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VRAMLEDGER"))}
    environ = {**plain, "PYTHONPATH": str(FAKE), "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8"}
    command = [sys.executable, str(program)]
    without = ended(command, environ, tmp_path)
    starter = [str(run), "run", "--agent.socket", str(tmp_path / "none"), "--"]
    inside = ended([*starter, *command], environ, tmp_path)
    assert (inside.status, inside.out) == (without.status, without.out)
    assert ADDRESS.sub(b"", inside.errors) == ADDRESS.sub(b"", without.errors)
