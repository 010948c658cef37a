"""Who may request what on the control socket, attacked from containers, as another user and as nobody."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.control_client import REFUSED, RELEASE, RESUME, SNAPSHOT, ask, request_bytes
from tests.support.exporter import QUICK, Exporter, run, serving
from tests.support.lingering import lingering
from tests.support.players.stage import Stage
from tests.support.requirements import require_namespaces, require_root
from tests.support.secured import USERS
from tests.support.standin.library import GIB, StandIn
from tests.support.stranger import as_user
from tests.support.waiting import wait_until
from vramledger.model.records import read_record
from vramledger.serving.control_socket import MAX_CONNECTIONS_PER_USER
from vramledger.views.ledger_json import LedgerAnswer

NOBODY, ANN = 65534, 12345
LONG = 600
"""Seconds: longer than a test waits for an answer."""

CONTAINED = "this process is in a container"

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


@contextmanager
def exporting(standin: StandIn, path: Path, *flags: str) -> Iterator[Exporter]:
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
    for request in (RELEASE, RESUME, SNAPSHOT):
        answer = ask(path, request, *wrapper)
        assert answer.status == 403
        assert CONTAINED in answer.error
        assert answer.rest == b""
    assert exporter.next_sample().up


@pytest.mark.parametrize("uid", [NOBODY, ANN])
def test_another_user_may_only_read(asked: tuple[Path, Exporter], uid: int) -> None:
    """Any user of the host reads what the page shows, and may not release the GPUs."""
    path, exporter = asked
    for request in (RELEASE, RESUME):
        assert ask(path, request, uid=uid).error == REFUSED
    answer = ask(path, SNAPSHOT, uid=uid)
    assert answer.status == 200
    assert read_record(answer.rest, LedgerAnswer).snapshot.up
    assert exporter.next_sample().up


def test_refusals_do_not_fill_the_log(asked: tuple[Path, Exporter]) -> None:
    """However many users ask for what they may not, the log gets a line a minute."""
    path, exporter = asked
    before = exporter.log.count("Refused a request")
    for uid in range(20_000, 20_030):
        assert ask(path, RELEASE, uid=uid).status == 403
    assert exporter.log.count("Refused a request") - before <= 1


def test_root_of_the_host_may_do_everything(standin: StandIn, directory: Path) -> None:
    """Root of the host may release, reopen and read, also in a mount namespace, as of a service."""
    require_namespaces()
    path = directory / "control"
    with exporting(standin, path) as exporter:
        exporter.until(lambda page: page.up, "data")
        for wrapper in ((), ("unshare", "--mount")):
            for request in (RELEASE, RESUME, SNAPSHOT):
                assert ask(path, request, *wrapper).status == 200


def test_with_a_password_only_root_may_read(standin: StandIn, directory: Path) -> None:
    """Where the page asks for a password, another user gets nothing over the socket; root does."""
    path, config = directory / "control", directory / "web.yml"
    config.write_text(USERS, encoding="utf-8")
    with exporting(standin, path, f"--web.config.file={config}"):
        for request in (SNAPSHOT, ("GET", "/api/v1/ledger", ""), ("GET", "/past?ask=at&at=1", "")):
            answer = ask(path, request, uid=ANN)
            assert (answer.status, answer.rest) == (403, b"")
            assert "the page asks for a password" in answer.error
        assert ask(path, SNAPSHOT).status == 200
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
        assert ask(path, ("GET", "/api/v1/ledger", ""), uid=ANN).head.keys() == page.keys()
        rest, whole = ask(path, SNAPSHOT, uid=ANN).rest, ask(path, SNAPSHOT).rest
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
        for number in range(100):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.setblocking(False)
            with as_user(ANN), suppress(OSError):
                connection.connect(str(path))
                if number % 3 == 1:
                    connection.send(request_bytes(*SNAPSHOT))
                if number % 3 == 2:
                    lingerer.send(connection, request_bytes(*SNAPSHOT))
        assert ask(path, SNAPSHOT).status == 200
        assert exporter.next_sample().up
        few = 2 * MAX_CONNECTIONS_PER_USER + 10
        wait_until(
            lambda: len(exporter.process.net_connections("all")) <= few, "what was refused to be closed"
        )
