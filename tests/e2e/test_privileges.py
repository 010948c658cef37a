"""The rights of the running exporter: none in the web part, and in the sampler those for reading /proc."""

import ctypes
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.support.exporter import (
    LOOPBACK,
    QUICK,
    SOURCES,
    Exporter,
    alive,
    command,
    environment,
    run,
    sampling,
    serving,
)
from tests.support.players.stage import Stage
from tests.support.ports import free_port
from tests.support.requirements import do_without, require_root, require_tool
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until

SEEING = 1 << 19 | 1 << 2
"""CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH."""


def status(process: psutil.Process) -> dict[str, str]:
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def sets(process: psutil.Process) -> dict[str, int]:
    return {name: int(value, 16) for name, value in status(process).items() if name.startswith("Cap")}


def healthy(port: int) -> bool:
    with (
        suppress(OSError),
        urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=10) as answer,
    ):
        return bool(answer.read() == b"vramledger is healthy.\n")
    return False


@pytest.fixture
def control(tmp_path: Path) -> str:
    return f"--control.socket={tmp_path / 'control.sock'}"


@pytest.fixture
def rooted(shared: Exporter) -> Exporter:
    """Return an exporter that was started as root, for tests that only look at it."""
    require_root()
    return shared


def listening(process: psutil.Process) -> set[str]:
    """Return the sockets on which a process listens, TCP and Unix."""
    inodes = set()
    for table, state, flag in (("tcp", 3, "0A"), ("tcp6", 3, "0A"), ("unix", 3, "00010000")):
        for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines()[1:]:
            fields = line.split()
            if fields[state] == flag:
                inodes.add(fields[6] if table == "unix" else fields[9])
    targets = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]  # noqa: PTH115
    return {each for each in targets if each.removeprefix("socket:[").rstrip("]") in inodes}


def starter(exporter: Exporter) -> psutil.Process:
    (found,) = exporter.process.children()
    return found


@contextmanager
def readable_by_all(standin: StandIn, *flags: str, wrapper: Sequence[str] = ()) -> Iterator[Exporter]:
    """Run an exporter with a Python that every user may read, so that it can become another user."""
    require_root()
    python = Path("/usr/bin/python3")
    packages = Path(aiohttp.__file__).parents[1]
    asking = [str(python), "-c", "import sys; print(*sys.version_info[:2])"]
    version = subprocess.check_output(asking, text=True).split() if python.exists() else []
    if version != [str(each) for each in sys.version_info[:2]]:
        pytest.skip("the system's own Python shows this: every user may read it")
    if not packages.stat().st_mode & 0o005:
        do_without("needs packages that every user may read")
    driver = {**standin.env(), "PYTHONPATH": f"{SOURCES}:{SOURCES / 'agent'}:{packages}"}
    with serving(*QUICK, *flags, driver=driver, python=str(python), wrapper=wrapper) as running:
        running.until(lambda page: page.up, "data")
        yield running


@pytest.fixture
def own_user(standin: StandIn, control: str) -> Iterator[Exporter]:
    """Run an exporter as root that becomes its own user."""
    with readable_by_all(standin, control) as running:
        yield running


def test_the_web_part_may_do_nothing(rooted: Exporter) -> None:
    """Started with every capability, no thread of the web part has one in any set, or can get one."""
    none = dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0)
    for thread in rooted.process.threads():  # Linux keeps them for each thread
        assert sets(psutil.Process(thread.id)) == none
        assert status(psutil.Process(thread.id))["NoNewPrivs"] == "1"


def test_the_web_part_changes_no_file(standin: StandIn, control: str) -> None:
    """Where the kernel has Landlock, the web part may change no file, and its sockets still go at its end."""
    require_root()
    if ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1) < 1:
        do_without("needs a kernel with Landlock")
    with sampling(control, "--log.level=debug", driver=standin.env()) as exporter:
        assert "May change no file but the sockets" in exporter.log
        assert run("release", control, driver=standin.env()).returncode == 0
    assert not Path(control.partition("=")[2]).exists()


def test_only_the_web_part_listens(rooted: Exporter) -> None:
    """Of all processes only the web part listens, on the port and two sockets; those with rights do not."""
    assert len(listening(rooted.process)) == 3
    privileged = rooted.process.children(recursive=True)
    assert [listening(each) for each in privileged] == [set()] * 2
    assert sets(starter(rooted))["CapEff"] == 0
    assert sets(starter(rooted))["CapPrm"] & ~SEEING == 0


def test_the_web_part_is_a_user_of_its_own(own_user: Exporter, standin: StandIn, control: str) -> None:
    """As root's exporter it becomes another user, without groups, and everything still works."""
    assert status(own_user.process)["Uid"].split() == ["65532"] * 4
    assert status(own_user.process)["Gid"].split() == ["65532"] * 4
    assert status(own_user.process)["Groups"] == ""
    assert set(sets(own_user.process).values()) == {0}
    assert own_user.sampler.uids().real == starter(own_user).uids().real == 0
    assert sets(own_user.sampler)["CapEff"] == SEEING & sets(own_user.sampler)["CapEff"] != 0
    before = own_user.sampler
    assert run("release", control, driver=standin.env()).returncode == 0
    assert run("release", "--resume", control, driver=standin.env()).returncode == 0
    own_user.until(lambda page: page.up, "data")
    assert own_user.sampler != before
    assert "by the exporter" in run("show", control, driver=standin.env()).stdout
    assert "level=warning" not in own_user.log


SIGHT = "+sys_ptrace,+dac_read_search"
DEPLOYMENTS = {
    "container": (("--inh-caps=-all", f"--bounding-set=-all,{SIGHT},+setuid,+setgid"), 65532, SEEING),
    "container of before": (("--inh-caps=-all", f"--bounding-set=-all,{SIGHT}"), 0, SEEING),
    "container without rights": (("--inh-caps=-all", "--bounding-set=-all", "--reuid=65532"), 65532, 0),
    "service": (
        ("--reuid=12345", f"--inh-caps={SIGHT}", f"--ambient-caps={SIGHT}", f"--bounding-set=-all,{SIGHT}"),
        12345,
        SEEING,
    ),
}
"""The rights that a container and a service start with, the user that listens, and what the sampler gets."""


@pytest.mark.parametrize(("flags", "uid", "seeing"), DEPLOYMENTS.values(), ids=DEPLOYMENTS)
def test_what_is_deployed_is_enough(
    standin: StandIn, directory: Path, flags: tuple[str, ...], uid: int, seeing: int
) -> None:
    """With the rights of each deployment the web part has none, and the sampler those for reading /proc."""
    wrapper = [str(require_tool("setpriv")), "--clear-groups", *flags]
    begins = uid if any(flag.startswith("--reuid") for flag in flags) else 0
    state = Path(standin.env()["VRAMLEDGER_STANDIN"])
    state.chmod(0o666)
    for path in (state, Path(standin.env()["LD_LIBRARY_PATH"], "libnvidia-ml.so.1")):
        for above in path.parents[:-2]:
            above.chmod(0o755)  # the runner's folders are private
    os.chown(directory, begins, -1)
    sockets = (f"--control.socket={directory}/control", f"--agent.socket={directory}/agent")
    with readable_by_all(standin, *sockets, wrapper=wrapper) as exporter:
        held = sets(exporter.process)
        assert (held["CapEff"], held["CapPrm"], held["CapInh"], held["CapAmb"]) == (0, 0, 0, 0)
        assert status(exporter.process)["Uid"].split() == [str(uid)] * 4
        assert sets(exporter.sampler)["CapEff"] == seeing
        assert "Could not give up" not in exporter.log


def test_its_user_cannot_touch_the_part_with_rights(own_user: Exporter) -> None:
    """Code that runs as the web part's user can neither signal nor trace the starter and the sampler."""
    program = (
        "import os, sys\nos.setgroups([]); os.setgid(65532); os.setuid(65532)\n"
        "for pid in sys.argv[1:]:\n"
        "    for act in (lambda: os.kill(int(pid), 9), lambda: open(f'/proc/{pid}/mem', 'rb')):\n"
        "        try: act()\n"
        "        except PermissionError: print('refused')\n"
    )
    pids = [str(each.pid) for each in (starter(own_user), own_user.sampler)]
    said = subprocess.check_output(["/usr/bin/python3", "-c", program, *pids], text=True)
    assert said.split() == ["refused"] * 4
    assert own_user.next_sample().up


def test_a_user_that_may_not_read_the_program(standin: StandIn, control: str) -> None:
    """If the other user may not read the program, the web part stays root without a right, and says so."""
    require_root()
    python = Path(sys.executable).resolve()
    if all(each.stat().st_mode & 0o001 for each in python.parents):
        pytest.skip("every user may read this Python")
    with sampling(control, "--web.user=65532", driver=standin.env()) as exporter:
        assert status(exporter.process)["Uid"].split() == ["0"] * 4
        assert set(sets(exporter.process).values()) == {0}
        assert "The part that listens stays root, without any capability" in exporter.log


def test_it_may_stay_root(standin: StandIn, control: str) -> None:
    """``--web.user=root`` keeps the user; a name that nobody has is one line and 1."""
    require_root()
    with sampling(control, "--web.user=root", driver=standin.env()) as exporter:
        assert status(exporter.process)["Uid"].split() == ["0"] * 4
        assert "stays root" not in exporter.log
    done = run("serve", "--web.user=no-such", driver=standin.env())
    assert done.returncode == 1
    assert "vramledger: --web.user=no-such: there is no such user; make it, or give a number" in done.stderr


def test_without_the_starter_it_ends(standin: StandIn, control: str) -> None:
    """If the process with the rights is killed, the exporter says so and ends, to be started again."""
    require_root()
    words, environ = command("serve", LOOPBACK, *QUICK, control), environment(standin.env())
    with subprocess.Popen(words, env=environ, stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: psutil.Process(process.pid).children(recursive=True)[1:], "a sampler")
        found, sampler = psutil.Process(process.pid).children(recursive=True)
        found.kill()
        log = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "vramledger: the process that starts samplers has ended; start the exporter again" in log
    wait_until(lambda: not alive(sampler), "the sampler to end with it")


def test_the_sampler_may_read_proc(rooted: Exporter) -> None:
    """The sampler has the two capabilities for other users' processes, and can get no other."""
    held = sets(rooted.sampler)
    assert held["CapEff"] == held["CapPrm"]
    assert held["CapEff"] & ~SEEING == 0
    assert (held["CapInh"], held["CapAmb"], held["CapBnd"] & ~SEEING) == (0, 0, 0)
    assert status(rooted.sampler)["NoNewPrivs"] == "1"


def test_a_second_sampler_has_the_same_rights(rooted: Exporter) -> None:
    """A sampler that replaces a killed one can read as much, although the web part has no effective right."""
    before, first = sets(rooted.sampler), rooted.sampler
    first.kill()
    rooted.until(lambda page: page.failures("sampler-exit"), "the loss")
    rooted.until(lambda page: page.up, "data")
    assert rooted.sampler != first
    assert sets(rooted.sampler) == before


def test_all_is_seen_of_other_users(standin: StandIn, stage: Stage, control: str) -> None:
    """After giving up its rights, root's exporter still reads the open files of another user's holder."""
    require_root()
    standin.device(0).set_processes([(stage.start(user=65534).pid, GIB)])
    with serving(*QUICK, control, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
        page = exporter.next_sample()
        assert page.value("collector_success", collector="process") == 1
        assert page.labels("process_info", "user") == {"nobody"}
        assert page.value("collector_success", collector="exporter") == 1


def test_its_memory_is_its_own(rooted: Exporter) -> None:
    """Other processes of the same user cannot read the web part's memory, which holds keys and passwords."""
    assert Path(f"/proc/{rooted.process.pid}/environ").stat().st_uid == 0
    program = f"import os; os.setgroups([]); open('/proc/{rooted.process.pid}/mem', 'rb')"
    bare = [str(require_tool("setpriv")), "--inh-caps=-all", "--bounding-set=-all", sys.executable]
    done = subprocess.run([*bare, "-c", program], capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr


def test_sockets_of_systemd(standin: StandIn, control: str) -> None:
    """With ``--web.systemd-socket`` it listens on the passed sockets; without any it says so and ends."""
    activate = require_tool("systemd-socket-activate")
    done = run("serve", "--web.systemd-socket", control, driver=standin.env())
    assert done.returncode == 1
    assert "systemd has passed no sockets" in done.stderr
    port = free_port()
    activating = [str(activate), f"--listen=127.0.0.1:{port}", "-E", "PYTHONPATH", "-E", "LD_LIBRARY_PATH"]
    serve = [sys.executable, "-m", "vramledger", "serve", "--web.systemd-socket", control]
    environment = {**os.environ, "PYTHONPATH": f"{SOURCES}:{SOURCES / 'agent'}", **standin.env()}
    with subprocess.Popen([*activating, *serve], env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: healthy(port), "an answer on the socket")
        finally:
            process.terminate()
