"""The rights of the running exporter: none in the web part, and in the sampler those for reading /proc."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.exporter import QUICK, Exporter, run, serving
from tests.support.players.stage import Stage
from tests.support.ports import free_port
from tests.support.requirements import require_root, require_tool
from tests.support.secured import USERS
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until

SEEING = 1 << 19 | 1 << 2
"""CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH."""


def status(process: psutil.Process) -> dict[str, str]:
    """Return the fields of ``/proc/PID/status``."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def sets(process: psutil.Process) -> dict[str, int]:
    """Return the capability sets of a process."""
    return {name: int(value, 16) for name, value in status(process).items() if name.startswith("Cap")}


def healthy(port: int) -> bool:
    """Tell whether an exporter answers at this address."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=10) as answer:
            return bool(answer.read() == b"vramledger is healthy.\n")
    except OSError:
        return False


@pytest.fixture
def control(tmp_path: Path) -> str:
    """Return the flag that names a control socket of this test."""
    return f"--control.socket={tmp_path / 'control.sock'}"


@pytest.fixture
def exporter(standin: StandIn, control: str) -> Iterator[Exporter]:
    """Run an exporter as root, and wait for its data."""
    require_root()
    with serving(*QUICK, control, driver=standin.env()) as running:
        running.until(lambda page: page.up, "data")
        yield running


def test_the_web_part_may_do_nothing(exporter: Exporter) -> None:
    """Started with every capability, the web part uses none and can get only two of them again."""
    held = sets(exporter.process)
    assert held["CapEff"] == 0
    assert held["CapPrm"] == held["CapInh"] == held["CapBnd"] == held["CapAmb"]
    assert held["CapPrm"] & ~SEEING == 0
    assert status(exporter.process)["NoNewPrivs"] == "1"


def test_every_thread_has_given_up(exporter: Exporter) -> None:
    """Linux keeps capabilities for each thread: no thread has kept an effective one."""
    for thread in Path(f"/proc/{exporter.process.pid}/task").iterdir():
        lines = (thread / "status").read_text(encoding="utf-8").splitlines()
        assert "CapEff:\t0000000000000000" in lines


def test_the_sampler_may_read_proc(exporter: Exporter) -> None:
    """The sampler has the two capabilities for other users' processes, and can get no other."""
    held = sets(exporter.sampler)
    assert held["CapEff"] == held["CapPrm"]
    assert held["CapEff"] & ~SEEING == 0
    assert (held["CapInh"], held["CapAmb"], held["CapBnd"] & ~SEEING) == (0, 0, 0)
    assert status(exporter.sampler)["NoNewPrivs"] == "1"


def test_a_second_sampler_has_the_same_rights(exporter: Exporter) -> None:
    """A sampler that replaces a killed one can read as much, although the web part has no effective right."""
    before, first = sets(exporter.sampler), exporter.sampler
    first.kill()
    exporter.until(lambda page: page.failures("sampler-exit"), "the loss")
    exporter.until(lambda page: page.up, "data")
    assert exporter.sampler != first
    assert sets(exporter.sampler) == before


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


def test_an_ordinary_user_does_what_that_allows(standin: StandIn, tmp_path: Path) -> None:
    """Without any capability it starts, serves data, and says where it cannot make its control socket."""
    require_root()
    setpriv = require_tool("setpriv")
    wrapper = [str(setpriv), "--inh-caps=-all", "--bounding-set=-all"]
    with serving(
        *QUICK, f"--control.socket={tmp_path / 'c'}", driver=standin.env(), wrapper=wrapper
    ) as exporter:
        exporter.until(lambda page: page.up, "data")
        assert sets(exporter.process)["CapPrm"] == 0
        assert sets(exporter.sampler)["CapPrm"] == 0


def test_its_memory_is_its_own(exporter: Exporter) -> None:
    """Other processes of the same user cannot read the web part's memory, which holds keys and passwords."""
    assert Path(f"/proc/{exporter.process.pid}/environ").stat().st_uid == 0
    program = (
        "import os, sys; os.setgroups([]);\n"
        "open(f'/proc/{sys.argv[1]}/mem', 'rb')"
    )  # fmt: skip
    bare = [str(require_tool("setpriv")), "--inh-caps=-all", "--bounding-set=-all", sys.executable]
    done = subprocess.run(
        [*bare, "-c", program, str(exporter.process.pid)], capture_output=True, text=True, check=False
    )
    assert "PermissionError" in done.stderr


def test_a_bad_web_configuration_keeps_it_from_starting(standin: StandIn, tmp_path: Path) -> None:
    """With an invalid web configuration it ends with one line and status 1, and does not serve without it."""
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_user:\n  x: y\n{USERS}", encoding="utf-8")
    done = run("serve", "--web.listen-address=127.0.0.1:0", f"--web.config.file={file}", driver=standin.env())
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("time="))
    assert said.startswith(f"vramledger: --web.config.file={file}: basic_auth_user is not a key")


def test_sockets_of_systemd(standin: StandIn, control: str) -> None:
    """With ``--web.systemd-socket`` it listens on the passed sockets; without any it says so and ends."""
    activate = require_tool("systemd-socket-activate")
    done = run("serve", "--web.systemd-socket", control, driver=standin.env())
    assert done.returncode == 1
    assert "systemd has passed no sockets" in done.stderr
    port = free_port()
    command = [str(activate), f"--listen=127.0.0.1:{port}", "-E", "PYTHONPATH", "-E", "LD_LIBRARY_PATH"]
    serve = [sys.executable, "-m", "vramledger", "serve", "--web.systemd-socket", control]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "exporter"), **standin.env()}
    with subprocess.Popen([*command, *serve], env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: healthy(port), "an answer on the socket")
        finally:
            process.terminate()
