"""What a local user does to the agents' socket costs no other user anything, and no scrape."""

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pytest

from tests.integration.agent_server.conftest import ME, Running
from tests.support.agent_client import connect, report, send
from tests.support.blocking_files import BlockingFiles, blocking_files
from tests.support.builders import device, holding, process, snapshot
from tests.support.lingering import Lingerer, lingering
from tests.support.players.stage import Stage
from tests.support.requirements import do_without, require_root
from tests.support.stranger import as_user, listening_as
from tests.support.waiting import wait_until
from vramledger.agent_server import disposal, server
from vramledger.agent_server.discovery import request_agents
from vramledger.errors import AgentError
from vramledger_agent import transport
from vramledger_agent.client import request_agent
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

LONG = 40
"""Seconds: longer than a test waits for an answer."""

Blocking: TypeAlias = "Lingerer | BlockingFiles"
Attack = Callable[[Path, Blocking], None]
REPORT = json.dumps(report()).encode()


@pytest.fixture(params=["socket", "file"])
def lingerer(request: pytest.FixtureRequest, stack: ExitStack) -> Blocking:
    """Give descriptors that take long to close: of sockets, and of files of a file system in user space."""
    if request.param == "socket":
        return stack.enter_context(lingering(LONG))
    require_root()
    place = Path(stack.enter_context(TemporaryDirectory(prefix="vl-")))
    try:
        return stack.enter_context(blocking_files(place))
    except OSError as error:
        do_without(f"no file system in user space can be mounted here ({error})")


def with_a_report(path: Path, lingerer: Blocking) -> None:
    with connect(path) as connection:
        lingerer.send(connection, REPORT)


def behind_a_report(path: Path, lingerer: Blocking) -> None:
    """Send one message with a socket behind a good one, and one more, and go."""
    with connect(path) as connection:
        connection.send(REPORT)
        lingerer.send(connection, b"x")
        with suppress(BrokenPipeError):
            connection.send(REPORT)


def with_nothing(path: Path, lingerer: Blocking) -> None:
    with connect(path) as connection:
        lingerer.send(connection, b"")


def with_an_answer_unread(path: Path, lingerer: Blocking) -> None:
    """Request something, send a socket, and go without having read the answer."""
    with connect(path) as connection:
        send(connection, {"version": 1, "ask": "devices"})
        with suppress(OSError):  # it may have been answered and closed before
            lingerer.send(connection, b"x")


def with_a_request_to_an_agent(path: Path, lingerer: Blocking) -> None:
    """Have a request passed on to an agent of ours that ends, with a socket behind the request."""
    with connect(path) as agent:
        send(agent, report(consents=["snapshot"]))
        with connect(path) as connection:
            send(connection, {"version": 1, "ask": "snapshot", "to": ME, "file": True})
            with suppress(OSError):  # the agent was not known yet
                lingerer.send(connection, b".")


def with_many_messages(path: Path, lingerer: Blocking) -> None:
    """Fill the queue of a connection with sockets."""
    with connect(path) as connection, suppress(OSError):
        connection.setblocking(False)
        while True:
            lingerer.send(connection, REPORT)


@pytest.mark.parametrize("attack", [
    with_a_report, behind_a_report, with_nothing, with_an_answer_unread, with_a_request_to_an_agent,
    with_many_messages,
])  # fmt: skip
def test_a_descriptor_whose_close_blocks_delays_nobody(
    running: Running, stack: ExitStack, stage: Stage, lingerer: Blocking, attack: Attack
) -> None:
    """Whatever a peer puts into its connection, others are heard at once."""
    other = stage.start(("connect", str(running.path)), ("say", report(1)))
    wait_until(lambda: running.sequence(other.pid) == 1, "another's first report")
    before = len(list(Path("/proc/self/fd").iterdir()))
    attack(running.path, lingerer)
    other.order("say", report(2))
    wait_until(lambda: running.sequence(other.pid) == 2, "another's second report")
    wait_until(lambda: running.health.connections == 1, "the attacker to have left")
    stack.close()
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "every descriptor to be closed")


def test_a_connection_that_is_refused_delays_nobody(
    running: Running, lingerer: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may not connect has sent already, and even that is closed elsewhere."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_USER", 0)

    def attack() -> None:
        for _ in range(5):
            with_a_report(running.path, lingerer)

    running.inside(attack)  # nobody is accepted meanwhile
    wait_until(lambda: running.rejected("connections-of-user") == 5, "all to be refused")


def test_the_end_is_not_delayed(tmp_path: Path, stack: ExitStack, lingerer: Blocking) -> None:
    """The exporter stops at once, though connections with such descriptors wait to be accepted."""
    running = Running(tmp_path / "agent.sock")
    waiting = [stack.enter_context(connect(running.path)) for _ in range(3)]

    def send_all() -> None:
        for connection in waiting:
            with suppress(OSError):
                lingerer.send(connection, REPORT)

    running.inside(send_all)  # the exporter reads nothing meanwhile
    stack.enter_context(connect(running.path))
    running.close()
    for connection in waiting:
        with suppress(ConnectionResetError):
            assert connection.recv(MAX_MESSAGE_BYTES) == b""


def refuse_three_and_hear_another(running: Running, lingerer: Blocking) -> None:
    for _ in range(3):
        with_a_report(running.path, lingerer)
    wait_until(lambda: running.rejected("limits") == 3, "them to be refused")
    running.inside(running._listener._sweep)  # noqa: SLF001 the timer's turn comes later
    running.hear(report(3))


def test_no_process_to_close_with_is_no_end(
    running: Running, lingerer: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no process can be started, such connections wait, others are heard, and they go later."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere")
        refuse_three_and_hear_another(running, lingerer)
    wait_until(lambda: not running._listener._disposal._waiting, "a process to take them")  # noqa: SLF001


def test_who_makes_a_process_hang_keeps_the_own_places_taken(
    running: Running, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor that never closes shuts out the one who sent it, and nobody else; its end lets them in."""
    require_root()
    blocking = stack.enter_context(lingering(LONG))
    monkeypatch.setattr(disposal, "_MAX_WAITING", 4)
    closing = running._listener._disposal  # noqa: SLF001
    monkeypatch.setattr(closing, "_most", 5)
    spawn, hung = os.posix_spawn, list[int]()

    def hang_first(path: str, program: list[str], *more: Any, **options: Any) -> int:  # noqa: ANN401
        waits = program if hung else ["sleep", str(LONG)]
        hung.append(spawn(path if hung else "/bin/sleep", waits, *more, **options))
        return hung[-1]

    monkeypatch.setattr(os, "posix_spawn", hang_first)

    def connect_as(user: int) -> socket.socket:
        with as_user(user):
            return connect(running.path)

    def pass_one(user: int) -> None:
        with running.inside(lambda: connect_as(user)) as connection, suppress(BrokenPipeError):
            blocking.send(connection, REPORT)
        running.inside(running._listener._sweep)  # noqa: SLF001 the timer's turn comes later

    def shut_out(user: int) -> bool:
        try:
            pass_one(user)
        except PermissionError:
            return True
        return False

    wait_until(lambda: shut_out(60_000), "the user to be shut out")
    wait_until(lambda: closing.held(60_000) >= 5, "the own places to stay taken")
    pass_one(60_001)
    wait_until(lambda: len(hung) > 1 and not closing.held(60_001), "what another has sent to be closed")
    with connect(running.path) as mine:
        send(mine, report(3))
        wait_until(lambda: any(each.report for each in running.agents), "a report")
    os.kill(hung[0], signal.SIGKILL)
    wait_until(lambda: not closing.held(60_000), "all to be closed")
    wait_until(lambda: not shut_out(60_000), "the user to be let in")


def test_a_user_finds_a_place_though_others_have_taken_all(
    running: Running, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all places are taken, the user with most loses one to a user with few; holders come first."""
    require_root()
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 8)
    path = str(running.path)
    for user in (60_000, 60_001):
        stage.start(("connect", path), ("say", report()), ("crowd", path, 3), user=user)
    wait_until(lambda: running.health.connections == 8, "all places to be taken")
    mine = stage.start(("connect", path), ("say", report()))
    wait_until(lambda: running.sequence(mine.pid), "the report")
    assert running.health.connections == 8
    assert running.rejected("connections") == 1
    holders = [each.pid for each in running.agents]
    running.snapshot = snapshot(device(0, list(map(holding, holders))), processes=list(map(process, holders)))
    for number in range(4):
        stage.start(("crowd", path, 1), user=60_002 + number)
    wait_until(lambda: running.rejected("connections") >= 5, "no more than there are places")
    assert {mine.pid, *holders} <= {each.pid for each in running.agents}, "holders stay"
    assert running.health.connections == 8


def test_reports_together_have_a_limit(
    running: Running, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When all reports are too long together, the longest of the user with most of them goes."""
    require_root()
    monkeypatch.setattr(server, "MAX_REPORT_BYTES", 4000)
    connecting = ("connect", str(running.path))
    mine = stage.start(connecting, ("say", report(zz="y" * 1000)))
    wait_until(lambda: running.agents, "my report")
    for _ in range(3):
        stage.start(connecting, ("say", report(agent="x" * 100, zz="y" * 1500)), user=60_000)
    wait_until(lambda: running.rejected("limits") >= 2, "them to be refused")
    assert running.sequence(mine.pid)


def test_an_agents_answer_delays_no_command(running: Running, lingerer: Blocking) -> None:
    """Whatever an agent sends with its answer, the command that asked it ends at once."""
    agent = running.hear(report(consents=["reclaim"]))

    def answer() -> None:
        _, passed = transport.receive(agent)
        with socket.socket(fileno=passed[0]) as client:
            lingerer.send(client, b'{"version":1,"ok":true}')

    with ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        with pytest.raises(AgentError, match="sent a descriptor"):
            request_agent(running.path, ME, "reclaim", {"seconds": 1.0})
        answered.result(5)


def test_an_answer_is_read_though_the_file_was_not(tmp_path: Path) -> None:
    """An answer that comes before the file is read is not lost: the kernel first says that it was not."""
    path = tmp_path / "socket"
    answer = json.dumps({"version": 1, "ok": False, "error": "this process does not consent"}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening, ThreadPoolExecutor(1) as pool:
        listening.bind(str(path))
        listening.listen()

        def refuse() -> None:
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(MAX_MESSAGE_BYTES)
                accepted.recvmsg(1, 0, socket.MSG_PEEK)  # the file is there now
                accepted.send(answer)

        for _ in range(50):
            refused = pool.submit(refuse)
            with pytest.raises(AgentError, match="does not consent"):
                request_agent(path, ME, "snapshot", {"seconds": 1.0}, file=0)
            refused.result(5)


def test_whoever_runs_first_nobody_waits(
    running: Running, stack: ExitStack, lingerer: Blocking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter never closes the last descriptor, even if its helper may run to its end first."""
    spawn = os.posix_spawn

    def run_first(*args: Any, **options: Any) -> int:  # noqa: ANN401 as the original
        pid = spawn(*args, **options)
        with suppress(TimeoutError):
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            wait_until(lambda: os.waitid(os.P_PID, pid, look), "its end", patience=0.5)
        return pid

    monkeypatch.setattr(os, "posix_spawn", run_first)
    refuse_three_and_hear_another(running, lingerer)
    stack.close()


def test_a_strangers_socket_gets_no_request_and_no_file(tmp_path: Path) -> None:
    """A command sends nothing to what another user listens on: root's file would be theirs to write."""
    require_root()
    path = tmp_path / "socket"
    with listening_as(60_000, path, socket.SOCK_SEQPACKET) as listening:
        with pytest.raises(AgentError, match="belongs to user 60000, neither to root nor to you"):
            request_agent(path, ME, "snapshot", {"seconds": 1.0}, file=0)
        with pytest.raises(ConnectionRefusedError, match="belongs to user 60000"):
            request_agents(path)
        for _ in range(2):
            with listening.accept()[0] as accepted:
                assert accepted.recv(100) == b""
