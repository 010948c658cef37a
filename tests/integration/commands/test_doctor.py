"""``vramledger doctor`` finds the exporter, wherever its sockets are."""

from __future__ import annotations

import socket
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.exporter import QUICK, no_driver, run, sampling, serving
from tests.support.requirements import require_root
from tests.support.standin.library import StandIn
from tests.support.stranger import listening_as
from vramledger.agent_server.discovery import NO_SOCKET, ExporterStatus, RunningExporter, find_exporters
from vramledger.commands import doctor
from vramledger.commands.doctor import ExporterContact, _exporter, _is_exporter, findings_text
from vramledger.readers.hosts.host import Host


def test_an_exporter_that_answers_is_found(standin: StandIn) -> None:
    """An exporter that commands reach is in order, and since when it has watched is said."""
    with sampling(driver=standin.env()) as exporter:
        done = run("doctor", driver={**standin.env(), **exporter.found})
    path = exporter.found["VRAMLEDGER_CONTROL_SOCKET"]
    assert f"ok    exporter {path}: commands ask it, and has watched since 20" in done.stdout


def test_an_exporter_elsewhere_is_found(standin: StandIn) -> None:
    """An exporter whose sockets are elsewhere is a gap; the remedies name its own sockets."""
    with sampling(driver=standin.env()) as exporter:
        pid = exporter.process.pid
        done = run("doctor", "--agent.socket=/nowhere-else", driver=standin.env())
    path = exporter.found["VRAMLEDGER_CONTROL_SOCKET"]
    assert done.returncode == 1
    assert "LACK  exporter /nowhere: an exporter listens elsewhere: " in done.stdout
    assert f"pid {pid} at {path}" in done.stdout
    assert "LACK  agents /nowhere-else: the exporter listens for agents at " in done.stdout


def test_the_agents_of_the_exporter_that_was_asked(standin: StandIn) -> None:
    """Beside another exporter, ``doctor`` looks at the agents' socket of the one that it asked."""
    with serving(*QUICK, driver=standin.env()) as other, serving(*QUICK, driver=standin.env()) as exporter:
        for each in (other, exporter):
            each.until(lambda page: page.up, "data")
        path = Path(exporter.found["VRAMLEDGER_CONTROL_SOCKET"])
        done = run("doctor", f"--control.socket={path}", driver=standin.env())
    assert f"agents {path.with_name('agent')}: programs of other users cannot reach" in done.stdout
    assert other.found["VRAMLEDGER_CONTROL_SOCKET"].removesuffix("control") not in done.stdout


def test_an_exporter_without_agents(standin: StandIn) -> None:
    """With ``--no-collector.agent`` nothing lacks: the limit says which flag brings the agents back."""
    with sampling("--no-collector.agent", driver=standin.env()) as exporter:
        done = run("doctor", driver={**standin.env(), **exporter.found})
    assert "agents /" not in done.stdout
    assert "no agent reports from a program; never fires: " in done.stdout
    assert "remedy: leave out --no-collector.agent" in done.stdout


def procfs(folder: Path, *pids: int) -> str:
    """Return the flag for a /proc that has only these processes: others may run exporters beside us."""
    (folder / "proc").mkdir()
    for name in ("stat", "self", "sys", "uptime", *map(str, pids)):
        (folder / "proc" / name).symlink_to(f"/proc/{name}")
    return f"--path.procfs={folder / 'proc'}"


def test_a_recording_is_no_exporter_of_this_host(tmp_path: Path, standin: StandIn) -> None:
    """Beside an exporter that plays a recording, ``doctor`` says that commands do not ask it."""
    none = no_driver(tmp_path / "lib")
    with serving("--source=auto", driver=none) as exporter:
        pid = exporter.process.pid
        flag = procfs(tmp_path, pid)
        without = run("doctor", flag, driver=none)
        beside = run("doctor", flag, driver=standin.env())
    said = f"LACK  exporter /nowhere: no exporter of this host runs (pid {pid} plays a recording): "
    assert said in without.stdout
    assert "plays a recording" not in beside.stdout, "with a driver, auto is the host's"


def test_no_exporter_is_a_gap(standin: StandIn, tmp_path: Path) -> None:
    """Where no exporter runs, ``doctor`` says what commands then do not know, and what to start."""
    done = run("doctor", procfs(tmp_path), driver=standin.env())
    assert done.returncode == 1
    assert "LACK  exporter /nowhere: no exporter runs: commands know nothing of before" in done.stdout
    assert "remedy: start 'vramledger serve'" in done.stdout


@pytest.mark.parametrize(
    ("words", "sockets"),
    [
        ("/opt/v/bin/python /opt/v/bin/vramledger serve", (None, None)),
        ("python -m vramledger serve --control.socket=/a --control.socket /b", ("/b", None)),
        ("vramledger serve --agent.socket /c --control.socket=", ("", "/c")),
        ("vramledger serve --agent.socket", (None, None)),
        ("/opt/v/bin/python /opt/v/bin/vramledger-python serve", (None, None)),  # as pip installs it
        ("sudo vramledger serve", None),  # only starts it
        ("vramledger show serve", None),
        ("less serve", None),
        ("serve", None),
        ("", None),
    ],
)
def test_exporters_are_known_by_their_command_line(
    tmp_path: Path, words: str, sockets: tuple[str | None, str | None] | None
) -> None:
    """Only ``vramledger serve`` is an exporter, however it is started; its last flags count."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_text(words.replace(" ", "\0") + "\0", encoding="utf-8")
    (tmp_path / "8").mkdir()
    (tmp_path / "acpi").mkdir()
    found = find_exporters(tmp_path)
    assert found == (() if sockets is None else (RunningExporter(7, *sockets),))


HOST = Host(Path("/proc"))


@pytest.mark.parametrize(("user", "named"), [(0, True), (12345, False)])
def test_no_strangers_socket_is_proposed(user: int, named: bool) -> None:
    """A program that only looks like an exporter, with a socket of another user, is not named."""
    require_root()
    with TemporaryDirectory(prefix="vl-") as name:
        path = Path(name, "control")
        with listening_as(user, path, socket.SOCK_STREAM):
            assert _is_exporter(RunningExporter(7, str(path), None), HOST) is named
            assert _is_exporter(RunningExporter(7, None, str(path)), HOST) is False, (
                "it is no socket for agents"
            )


@pytest.mark.parametrize(
    ("uids", "listens", "named"),
    [("0 0 0 0", None, True), ("65532 65532 65532 65532", 0, True), ("12345 12345 12345 12345", None, False),
     ("12345 0 0 0", None, False), ("12345 12345 12345 12345", 12345, False)],
)  # fmt: skip
def test_a_stranger_without_flags_is_no_exporter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uids: str, listens: int | None, named: bool
) -> None:
    """Without flags it is root's program, or the usual socket is root's; setuid is not enough."""
    require_root()
    (tmp_path / "stat").write_text("btime 1\n")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "status").write_text("Uid:\t" + "\t".join(uids.split()) + "\n")
    usual = tmp_path / "control"
    monkeypatch.setattr(doctor, "CONTROL_SOCKET", usual)
    with nullcontext() if listens is None else listening_as(listens, usual, socket.SOCK_STREAM):
        assert _is_exporter(RunningExporter(7, None, None), Host(tmp_path)) is named


def test_a_proposed_command_is_one_command() -> None:
    """A link with a name of a stranger's may lead to root's socket: what root copies runs nothing else."""
    found = RunningExporter(7, "/tmp/$(id)", "/tmp/a;id")  # noqa: S108
    nowhere = ExporterStatus(Path("/run/agents"), NO_SOCKET)
    contact = ExporterContact(Path("/run/control"), "no exporter answers", None, nowhere, (found,))
    text = findings_text(list(_exporter(contact)))
    assert "--control.socket='/tmp/$(id)' to" in text
    assert "VRAMLEDGER_AGENT_SOCKET='/tmp/a;id'" in text
