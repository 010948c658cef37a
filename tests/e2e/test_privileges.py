"""What the running exporter may do: nothing in the web part, and in the sampler what reading /proc takes."""

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
    """Tell whether an exporter answers there."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/-/healthy", timeout=10) as answer:
            return bool(answer.read() == b"vramledger is healthy.\n")
    except OSError:
        return False


@pytest.fixture
def control(tmp_path: Path) -> str:
    """Give the flag that names a control socket of this test's own."""
    return f"--control.socket={tmp_path / 'control.sock'}"


@pytest.fixture
def exporter(standin: StandIn, control: str) -> Iterator[Exporter]:
    """Run an exporter as root, with data."""
    require_root()
    with serving(*QUICK, control, driver=standin.env()) as running:
        running.until(lambda page: page.up, "data")
        yield running


def test_the_web_part_may_do_nothing(exporter: Exporter) -> None:
    """Started with every capability, the web part uses none, and none but two can ever come back."""
    held = sets(exporter.process)
    assert held["CapEff"] == 0
    assert held["CapPrm"] == held["CapInh"] == held["CapBnd"] == held["CapAmb"]
    assert held["CapPrm"] & ~SEEING == 0
    assert status(exporter.process)["NoNewPrivs"] == "1"


def test_every_thread_has_given_up(exporter: Exporter) -> None:
    """Capabilities are a thread's own in Linux: none of the threads has kept any in use."""
    for thread in Path(f"/proc/{exporter.process.pid}/task").iterdir():
        lines = (thread / "status").read_text(encoding="utf-8").splitlines()
        assert "CapEff:\t0000000000000000" in lines


def test_the_sampler_may_read_proc(exporter: Exporter) -> None:
    """The sampler has the two capabilities that other users' processes take, and can get no other."""
    held = sets(exporter.sampler)
    assert held["CapEff"] == held["CapPrm"]
    assert held["CapEff"] & ~SEEING == 0
    assert (held["CapInh"], held["CapAmb"], held["CapBnd"] & ~SEEING) == (0, 0, 0)
    assert status(exporter.sampler)["NoNewPrivs"] == "1"


def test_a_second_sampler_has_the_same_rights(exporter: Exporter) -> None:
    """When the sampler is killed the next one sees as much, although the web part may do nothing itself."""
    before, first = sets(exporter.sampler), exporter.sampler
    first.kill()
    exporter.until(lambda page: page.failures("sampler-exit"), "the loss")
    exporter.until(lambda page: page.up, "data")
    assert exporter.sampler != first
    assert sets(exporter.sampler) == before


def test_all_is_seen_of_other_users(standin: StandIn, stage: Stage, control: str) -> None:
    """With its rights given up, an exporter of root's still reads what a holder of another user has open."""
    require_root()
    standin.device(0).set_processes([(stage.start(user=65534).pid, GIB)])
    with serving(*QUICK, control, driver=standin.env()) as exporter:
        exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
        page = exporter.next_sample()
        assert page.value("collector_success", collector="process") == 1
        assert page.labels("process_info", "user") == {"nobody"}
        assert page.value("collector_success", collector="exporter") == 1


def test_an_ordinary_user_does_what_that_allows(standin: StandIn, tmp_path: Path) -> None:
    """Without any capability it starts, serves data, and says at which place it cannot be told to release."""
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
    """No process of the same user may read the web part's memory, where keys and passwords pass through."""
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
    """With a bad file it ends at once with one line and status 1, rather than serve without the file."""
    file = tmp_path / "web.yml"
    file.write_text(f"basic_auth_user:\n  x: y\n{USERS}", encoding="utf-8")
    done = run("serve", "--web.listen-address=127.0.0.1:0", f"--web.config.file={file}", driver=standin.env())
    assert done.returncode == 1
    (said,) = (line for line in done.stderr.splitlines() if not line.startswith("time="))
    assert said.startswith(f"vramledger: --web.config.file={file}: basic_auth_user is not a key")


def test_sockets_of_systemd(standin: StandIn, control: str) -> None:
    """With --web.systemd-socket it answers on the sockets that it was given, and without any it says so."""
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
