"""Who may request what on the control socket, attacked from containers, as another user and as nobody."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.exporter import QUICK, Exporter, run, serving
from tests.support.lingering import lingering
from tests.support.players.stage import Stage
from tests.support.requirements import require_namespaces, require_root
from tests.support.secured import USERS
from tests.support.standin.library import GIB, StandIn
from tests.support.waiting import wait_until
from vramledger.model.records import read_record
from vramledger.serving.control_messages import (
    LEDGER,
    RELEASE,
    RESUME,
    SNAPSHOT_PACKET_BYTES,
    ControlRequest,
    write_request,
)
from vramledger.serving.control_socket import MAX_CONNECTIONS_PER_USER
from vramledger.views.ledger_answer import LedgerAnswer

NOBODY, ANN = 65534, 12345
LONG = 600
"""Seconds: longer than a test waits for an answer."""

REFUSED = "only root and the exporter's own user may request that"
CONTAINED = "this process is in a container"

ASKING = f"""
import os, socket, sys
path, uid, request = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if uid: os.setgroups([]); os.setgid(uid); os.setuid(uid)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect(path)
    connection.send(request.encode())
    for _ in range(1000):
        packet = connection.recv({SNAPSHOT_PACKET_BYTES})
        sys.stdout.buffer.write(packet + b"\\n" * (_ == 0))
        if not packet: break
"""

ROOT_OF_ITS_OWN = """
set -e
mount -t tmpfs none "$1"
for each in /usr /lib /lib64 /bin /root /work /proc /tmp /dev; do
    if [ -d $each ]; then mkdir -p "$1$each"; mount --rbind $each "$1$each"; fi
done
mount -o remount,bind,ro "$1/tmp"
root=$1; shift
exec chroot "$root" "$@"
"""
"""A container's root directory, with the host's PID namespace; the socket is there by a read-only mount."""


def ask(path: Path, request: ControlRequest, *wrapper: str, uid: int = 0) -> tuple[dict[str, Any], bytes]:
    """Send a request as some user out of some container; return the answer and what follows it."""
    message = write_request(request).decode()
    done = subprocess.run(
        [*wrapper, "/usr/bin/python3", "-c", ASKING, str(path), str(uid), message],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    answer, _, rest = done.stdout.partition(b"\n")
    return json.loads(answer), rest


@pytest.fixture
def directory() -> Iterator[Path]:
    """Return a directory that every user reaches."""
    with tempfile.TemporaryDirectory(prefix="control-", dir="/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def exporting(standin: StandIn, path: Path, *flags: str) -> Iterator[Exporter]:
    """Run an exporter of root, and check at the end that it still has data and the GPUs."""
    require_root()
    with serving(*QUICK, f"--control.socket={path}", *flags, driver=standin.env()) as exporter:
        yield exporter


@pytest.fixture
def asked(shared: Exporter) -> tuple[Path, Exporter]:
    """Return the control socket of an exporter of root, which every user reaches, and the exporter."""
    require_root()
    path = Path(shared.found["VRAMLEDGER_CONTROL_SOCKET"])
    path.parent.chmod(0o755)
    return path, shared


CONTAINERS = {
    "user namespace": ("unshare", "--user", "--map-root-user"),
    "PID namespace": ("unshare", "--pid", "--fork", "--mount-proc"),
    "both": ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"),
    "root directory": ("unshare", "--mount", "sh", "-c", ROOT_OF_ITS_OWN, "sh", "ROOT"),
}


@pytest.mark.parametrize("container", CONTAINERS.values(), ids=CONTAINERS)
def test_no_container_is_obeyed(
    asked: tuple[Path, Exporter], directory: Path, container: tuple[str, ...]
) -> None:
    """Root of a container, which has the socket by a mount, may neither release nor reopen nor read."""
    require_namespaces()
    path, exporter = asked
    root = directory / "root"
    root.mkdir()
    wrapper = [str(root) if word == "ROOT" else word for word in container]
    for request in (ControlRequest(RELEASE, 60.0), ControlRequest(RESUME), ControlRequest(LEDGER)):
        answer, rest = ask(path, request, *wrapper)
        assert answer["ok"] is False
        assert CONTAINED in answer["error"]
        assert rest == b""
    assert exporter.next_sample().up


@pytest.mark.parametrize("uid", [NOBODY, ANN])
def test_another_user_may_only_read(asked: tuple[Path, Exporter], uid: int) -> None:
    """Any user of the host reads what the page shows, and may not release the GPUs."""
    path, exporter = asked
    for request in (ControlRequest(RELEASE, 60.0), ControlRequest(RESUME)):
        assert ask(path, request, uid=uid)[0]["error"] == REFUSED
    answer, rest = ask(path, ControlRequest(LEDGER), uid=uid)
    assert answer["ok"] is True
    assert read_record(rest, LedgerAnswer).snapshot.up
    assert exporter.next_sample().up


def test_root_of_the_host_may_do_everything(standin: StandIn, directory: Path) -> None:
    """Root of the host may release, reopen and read, also in a mount namespace, as of a service."""
    require_namespaces()
    path = directory / "control"
    with exporting(standin, path) as exporter:
        exporter.until(lambda page: page.up, "data")
        for wrapper in ((), ("unshare", "--mount")):
            for request in (ControlRequest(RELEASE, 60.0), ControlRequest(RESUME), ControlRequest(LEDGER)):
                assert ask(path, request, *wrapper)[0]["ok"] is True


def test_with_a_password_only_root_may_read(standin: StandIn, directory: Path) -> None:
    """Where the page asks for a password, another user gets nothing over the socket; root does."""
    path, config = directory / "control", directory / "web.yml"
    config.write_text(USERS, encoding="utf-8")
    with exporting(standin, path, f"--web.config.file={config}"):
        answer, rest = ask(path, ControlRequest(LEDGER), uid=ANN)
        assert (answer["ok"], rest) == (False, b"")
        assert "the page asks for a password" in answer["error"]
        assert ask(path, ControlRequest(LEDGER))[0]["ok"] is True
        shown = run("show", f"--control.socket={path}", driver=standin.env())
        assert "by the exporter" in shown.stdout


def test_a_user_sees_of_others_what_the_page_shows(standin: StandIn, stage: Stage, directory: Path) -> None:
    """Of another user's program there is no more than on the page; of an own one there is everything."""
    path = directory / "control"
    own, other = stage.start(user=ANN), stage.start(user=NOBODY)
    standin.device(0).set_processes([(own.pid, GIB), (other.pid, GIB)])
    with exporting(standin, path) as exporter:
        exporter.until(lambda page: len(page.values("process_info")) == 2, "the holders")
        page = json.loads(exporter.get("/api/v1/ledger")[1])
        _, rest = ask(path, ControlRequest(LEDGER), uid=ANN)
        _, whole = ask(path, ControlRequest(LEDGER))
    snapshot, everything = read_record(rest, LedgerAnswer).snapshot, read_record(whole, LedgerAnswer).snapshot
    mine, theirs = snapshot.facts_of(own.pid), snapshot.facts_of(other.pid)
    assert mine is not None
    assert theirs is not None
    assert mine == everything.facts_of(own.pid)
    assert mine.cgroup
    assert set(snapshot.rows) == {own.pid}
    shown = {each["pid"]: each for device in page["devices"] for each in device["holdings"]}
    assert (theirs.user, theirs.command) == (shown[other.pid]["user"], shown[other.pid]["command"])
    assert (theirs.cgroup, theirs.parent, theirs.settings, theirs.libraries) == (None, None, (), None)
    assert str(other.pid) not in str(snapshot.rows)


def test_a_hostile_user_delays_nobody(standin: StandIn, directory: Path) -> None:
    """Who sends nothing, reads nothing or brings files that hang when closed costs nobody else anything."""
    path = directory / "control"
    with ExitStack() as stack, exporting(standin, path) as exporter:
        exporter.until(lambda page: page.up, "data")
        lingerer = stack.enter_context(lingering(LONG))
        os.seteuid(ANN)
        try:
            for number in range(100):
                connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                connection.setblocking(False)
                with suppress(OSError):
                    connection.connect(str(path))
                    if number % 3 == 1:
                        connection.send(write_request(ControlRequest(LEDGER)))
                    if number % 3 == 2:
                        lingerer.send(connection, write_request(ControlRequest(LEDGER)))
        finally:
            os.seteuid(0)
        assert ask(path, ControlRequest(LEDGER))[0]["ok"] is True
        assert exporter.next_sample().up
        few = 2 * MAX_CONNECTIONS_PER_USER + 10
        wait_until(lambda: len(sockets_of(exporter)) <= few, "what was refused to be closed")


def sockets_of(exporter: Exporter) -> list[str]:
    """Return the sockets that an exporter has open."""
    found = []
    for each in Path(f"/proc/{exporter.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(each))  # noqa: PTH115
    return [each for each in found if each.startswith("socket:")]
