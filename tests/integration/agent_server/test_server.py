"""The agents' socket: who may report, who is refused, and what each client gets."""

import array
import errno
import json
import os
import socket
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from msgspec.structs import replace

from tests.integration.agent_server.conftest import ME, Running
from tests.support.agent_client import connect, report, send, torch
from tests.support.builders import device, holding, process, snapshot
from tests.support.players.stage import Stage
from tests.support.requirements import require_root
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.agent_server import connection as agent_connection
from vramledger.agent_server import disposal, requests, server
from vramledger.agent_server.connection import SILENT_AFTER
from vramledger.agent_server.discovery import NO_SOCKET, find_exporter, request_agents
from vramledger.agent_server.unix_socket import SocketFile
from vramledger.errors import StartupError
from vramledger.model.agent_report import Agent, ReportedRank
from vramledger.model.records import read_record
from vramledger_agent import transport
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

NOBODY = 65534
NO_PID = 5_000_000
"""No process has this pid or a larger one: the kernel's limit is 2**22."""


def closed(connection: socket.socket) -> bool:
    """Tell whether the other end has closed; waits for it."""
    try:
        return connection.recv(MAX_MESSAGE_BYTES) == b""
    except ConnectionError:
        return True


def asked(connection: socket.socket, **question: Any) -> dict[str, Any]:  # noqa: ANN401 JSON
    send(connection, {"version": 1, **question})
    answer: dict[str, Any] = json.loads(connection.recv(MAX_MESSAGE_BYTES))
    return answer


def test_a_rendezvous_on_localhost_is_that_of_this_node(running: Running) -> None:
    """Ranks that meet at an address local to a node get the node's name, as by their environment."""
    running.hear(report(rank={"number": 0, "size": 2, "job": ":29500"}))
    told = sure(running.agents[0].report)
    assert told.rank == ReportedRank(0, 2, f"{os.uname().nodename}:29500")


def test_who_reports_is_who_the_kernel_says(running: Running) -> None:
    """A report counts for the pid, start time and user of the connected process, whatever it says itself."""
    running.hear(report(7, pid=1, uid=0, start=5))
    (agent,) = running.agents
    stat = Path(f"/proc/{ME}/stat").read_text("ascii").rpartition(")")[2].split()
    assert (agent.pid, agent.start, agent.uid) == (ME, int(stat[19]), os.getuid())
    assert sure(agent.report).sequence == 7


def test_only_the_newest_report_counts_and_grows_old(running: Running) -> None:
    """The newest report is shown until it is too old; the next report makes the agent up again."""
    connection = running.connect()
    for number in range(1, 4):
        send(connection, report(number, interval=4.0))
    wait_until(lambda: running.sequence() == 3, "the newest")
    running.clock.now += 19.9
    assert running.sequence() == 3
    running.clock.now += 0.2
    assert running.agents[0].problem == "silent"
    assert running.sequence() is None
    send(connection, report(4, interval=0.1))
    wait_until(lambda: not running.agents[0].problem, "the next report")
    running.clock.now += SILENT_AFTER + 0.1
    assert running.agents[0].problem == "silent"


def test_a_sample_has_what_agents_said_before_it(running: Running) -> None:
    """A report that was sent before a reading is in it, however soon it was sent before."""
    connection = running.hear(report(1))
    for number in range(2, 6):
        send(connection, report(number))
        running.reading()
        assert running.sequence() == number


def test_an_agent_is_heard_also_without_samples(running: Running) -> None:
    """Reports are read every few seconds while no driver answers."""
    connection = running.connect()
    for number in (1, 2):
        send(connection, report(number))
        wait_until(lambda: running.sequence(sample=False) == number, "the report")  # noqa: B023 called at once


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"{", "format"),
        (b"\xff\xfe", "format"),
        (b'{"version":3}', "version"),
        (b" " * (MAX_MESSAGE_BYTES + 1), "size"),
        (json.dumps({"version": 1, "ask": [], "to": 1}).encode(), "format"),
        (json.dumps({"version": 1, "ask": "snapshot", "to": True}).encode(), "format"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_who_breaks_the_format_is_closed(running: Running, data: bytes, reason: str) -> None:
    """An invalid message closes its sender's connection, and is counted by its reason."""
    connection = running.connect()
    connection.send(data)
    assert closed(connection)
    assert running.rejected(reason) == 1
    assert running.health.connections == 0
    (agent,) = running.agents
    assert (agent.pid, agent.problem, agent.report) == (ME, "refused", None)
    with connect(running.path) as again:
        send(again, report())
        wait_until(lambda: running.agents[0].problem == "", "the agent to have mended")


def test_a_message_that_is_not_known_costs_itself_alone(running: Running) -> None:
    """A newer version may send another kind of message, or ask something else: its reports go on."""
    connection = running.hear(report(1))
    send(connection, {"version": 1, "news": {"sun": True}})
    send(connection, report(2))
    wait_until(lambda: running.sequence() == 2, "the report after it")
    for question in ({"ask": "weather"}, {"ask": "weather", "to": ME}):
        answer = asked(running.connect(), **question)
        assert answer["ok"] is False
        assert "does not know" in answer["error"]
    assert (running.sequence(), running.rejected("format")) == (2, 0)
    assert running.agents[0].problem == ""


def test_a_flood_is_not_read(running: Running) -> None:
    """After a burst a connection is read only as fast as the rate allows, and its sender waits."""
    connection, other = running.connect(), running.connect()
    connection.setblocking(False)

    def flooded() -> bool:
        try:
            while True:
                send(connection, report(1))
        except BlockingIOError:
            running.reading()
            return running.rejected("rate") > 0

    wait_until(flooded, "the listener to stop reading")
    send(other, report(2))
    wait_until(lambda: running.agents and running.agents[0].report, "the other connection to be heard")


def test_a_user_has_so_many_connections(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit of a user, or of all, the next connection is closed immediately; the others stay."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_USER", 3)
    for _ in range(3):
        running.connect()
    assert closed(running.connect())
    assert running.rejected("connections-of-user") == 1
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_USER", 4)
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    assert closed(running.connect())
    assert running.rejected("connections") == 1
    assert running.health.connections == 3


def test_who_only_connects_is_made_to_wait(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a burst, connections are accepted at a fixed rate, and none is lost."""
    monkeypatch.setattr(server, "_USER_ACCEPT_BURST", 1000.0)
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_USER", 1000)
    many = int(server.ACCEPT_BURST) + 3
    for _ in range(many):
        running.connect()
        assert running.health.listening  # a turn of the event loop, in which waiting connections are accepted
    assert running.health.connections < many
    running.clock.now += 1
    wait_until(lambda: running.health.connections == many, "the others, a second later")


def test_a_user_who_only_connects_takes_no_others_turn(running: Running, stage: Stage) -> None:
    """Beyond a burst a user's connections are closed at once, and do not count among those of all."""
    require_root()
    many = int(server._CLOSE_BURST)  # noqa: SLF001
    program = stage.start(("connect", str(running.path)), user=NOBODY)
    for _ in range(many):
        running.connect().close()
    wait_until(lambda: running.rejected("connections-of-user"), "me to be refused")
    program.order("connect", str(running.path))
    program.order("say", report())
    wait_until(lambda: running.sequence(program.pid), "the other user")


def test_what_is_dropped_of_refused_connections_takes_a_share_of_time(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who fills a connection that is refused makes the next ones wait for as long as that has cost."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS_PER_USER", 0)
    monkeypatch.setattr(server, "_CLOSE_COST", 1e6)

    def fill() -> None:
        for _ in range(3):
            connection = running.connect()
            for _ in range(5):
                connection.send(b"x")

    running.inside(fill)  # nobody is accepted meanwhile
    for number in (1, 2, 3):
        wait_until(partial(running.rejected, "connections-of-user"), "the first")
        assert running.health.listening  # a turn of the event loop, in which no other is accepted
        assert running.rejected("connections-of-user") == number
        running.clock.now += 3600
        running.inside(running._listener._accept)  # noqa: SLF001 the timer's turn comes later


def test_descriptors_are_not_kept(running: Running) -> None:
    """Descriptors that come with a report, or too many of them, are closed with the connection."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for count in (1, 5):
        with connect(running.path) as connection:
            rights = array.array("i", [0] * count)
            message = json.dumps(report()).encode()
            connection.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            assert closed(connection)
    assert running.rejected("limits") == 2
    # There are fewer when one of an earlier test was closed too.
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before, "every descriptor to be closed")


def test_who_says_nothing_is_closed(running: Running) -> None:
    """A connection without a first message is closed."""
    connection = running.connect()
    wait_until(lambda: running.health.connections == 1, "the connection")
    running.clock.now += server.FIRST_MESSAGE_TIMEOUT + 1
    running.inside(running._listener._sweep)  # noqa: SLF001 the timer's turn comes later
    assert closed(connection)
    assert running.rejected("mute") == 1


@pytest.mark.parametrize(
    ("question", "answer", "reason"), [("has_ended", True, "process"), ("read_credentials", (0, 0), "pid")]
)
def test_a_peer_that_is_no_process_is_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch, question: str, answer: object, reason: str
) -> None:
    """It ended before we read it, or its pid was reused; outside our PID namespace the kernel says pid 0."""
    monkeypatch.setattr(agent_connection, question, lambda _: answer)
    assert closed(running.connect())
    assert running.rejected(reason) == 1


@pytest.mark.parametrize("known", [True, False])
def test_a_kernel_that_cannot_hold_a_process_has_no_agents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, known: bool
) -> None:
    """Without pidfd_open (before Linux 5.3) no agent can connect, and the log says what is needed."""

    def refuse(_pid: int, _flags: int = 0) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if known:  # to Python, and not to the kernel
        monkeypatch.setattr(os, "pidfd_open", refuse)
    else:
        monkeypatch.delattr(os, "pidfd_open")
    with closing(Running(tmp_path / "agent.sock")) as running:
        assert not running.path.exists()
    (said,) = [record for record in caplog.records if record.getMessage() == "No agents"]
    assert "Linux has from 5.3 on" in str(said.__dict__)


def test_a_question_goes_to_the_agent_with_its_asker(running: Running, stack: ExitStack) -> None:
    """The agent gets the client's own connection and file, and responds directly."""
    agent, asker = running.hear(report(consents=["snapshot"])), running.connect()
    file = os.memfd_create("output")
    stack.callback(os.close, file)
    send(asker, {"version": 1, "ask": "snapshot", "to": ME, "seconds": 3, "file": True})
    asker.sendmsg([b"."], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))])
    data, passed = transport.receive(agent)
    assert json.loads(data) == {"version": 1, "ask": "snapshot", "seconds": 3, "file": True}
    with socket.socket(fileno=passed[0]) as direct, os.fdopen(transport.receive(direct)[1][0], "wb") as out:
        assert disposal.read_credentials(direct)[0] == ME
        out.write(b"dump")
        direct.send(b'{"version":1,"ok":true}')
    assert json.loads(asker.recv(MAX_MESSAGE_BYTES)) == {"version": 1, "ok": True}
    assert closed(asker), "the exporter has let go of it too"
    assert os.pread(file, 10, 0) == b"dump"
    assert running.agents, "the agent goes on"


def test_questions_that_reach_nobody(running: Running) -> None:
    """A client that names a process without an agent gets an error."""
    answer = asked(running.connect(), ask="reclaim", to=1)
    assert answer == {"version": 1, "ok": False, "error": "no agent in pid 1; start it with 'vramledger run'"}


def test_another_users_agent_is_not_bothered(running: Running, stage: Stage) -> None:
    """The exporter itself refuses a request to another user's agent."""
    require_root()
    running.hear(report())
    question = {"version": 1, "ask": "reclaim", "to": ME}
    answer = stage.start(user=NOBODY).order("ask", str(running.path), question)
    assert answer["ok"] is False
    assert "another user" in answer["error"]


def test_what_holds_the_devices(running: Running, stage: Stage) -> None:
    """A client gets all bytes, but pids and names only of its own user's holders; root gets all."""
    require_root()
    mine = process(20)
    processes = [process(10), replace(mine, facts=structs.replace(sure(mine.facts), uid=NOBODY))]
    running.snapshot = snapshot(device(0, [holding(10), holding(20)]), processes=processes)
    whole = asked(running.connect(), ask="devices")["devices"][0]
    assert [each["pid"] for each in whole["holders"]] == [10, 20]
    assert whole["total"] > whole["used"] > 0
    answer = stage.start(user=NOBODY).order("ask", str(running.path), {"version": 1, "ask": "devices"})
    others, own = answer["devices"][0]["holders"]
    assert sorted(others) == ["bytes", "owner_type", "state"]
    assert own["pid"] == 20


def test_the_askers_own_holding_is_marked(running: Running) -> None:
    """A client finds its own holding by the kernel's pid, however many others there are, and no other."""
    held = [*(holding(pid, pid) for pid in range(NO_PID, NO_PID + 100)), holding(ME, 1)]
    running.snapshot = snapshot(*(device(index, held) for index in range(16)))
    answer = asked(running.connect(), ask="devices")
    for each in answer["devices"]:
        assert [(one["bytes"], one["pid"]) for one in each["holders"] if "self" in one] == [(1, ME)]
        assert len(each["holders"]) > 1


def test_many_holders_still_fit_a_message(running: Running) -> None:
    """The response fits into the client's buffer, with the largest holders in it."""
    held = [holding(pid, pid) for pid in range(NO_PID, NO_PID + 2000)]
    running.snapshot = snapshot(*(device(index, held) for index in range(16)))
    answer = asked(running.connect(), ask="devices")
    assert len(answer["devices"]) == 16
    assert answer["devices"][0]["holders"][0]["bytes"] == NO_PID + 1999


@pytest.mark.parametrize("outside", [True, False])
def test_a_command_learns_what_agents_say(
    running: Running, stage: Stage, monkeypatch: pytest.MonkeyPatch, outside: bool
) -> None:
    """Commands get the agents that the exporter has: a user gets its own, root gets all."""
    monkeypatch.setattr(requests, "is_outside_containers", lambda _: outside)
    running.hear(report(5, frameworks=[torch(ooms=1)]))
    assert request_agents(running.path) == running.agents
    assert find_exporter(running.path)[1:3] == (None, 1)
    if os.geteuid() == 0:
        answer = stage.start(user=NOBODY).order("ask", str(running.path), {"version": 1, "ask": "agents"})
        assert answer["agents"] == 0


def test_a_strangers_answer_costs_no_memory_for_as_long_as_it_is_kept(
    running: Running, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user gets no file, whose pages would be ours, but the own agents that fit a message, each whole."""
    require_root()
    monkeypatch.setattr(requests, "MAX_MESSAGE_BYTES", 500)
    path = str(running.path)
    for _ in range(3):
        stage.start(("connect", path), ("say", report(python="x" * 100)), user=NOBODY)
    wait_until(lambda: sum(each.report is not None for each in running.agents) == 3, "the reports")
    answer = stage.start(user=NOBODY).order("ask_whole", path, {"version": 1, "ask": "agents"})
    head, lines = answer["messages"]
    assert (json.loads(head)["agents"], answer["passed"]) == (3, False)
    assert len([read_record(line, Agent) for line in lines.encode().splitlines()]) == 2
    assert len(lines) <= 500


def test_doctor_sees_a_place_without_an_exporter(tmp_path: Path) -> None:
    """No socket, a dead socket and one that others cannot reach are three different findings."""
    path = tmp_path / "agent.sock"
    assert find_exporter(path).problem == NO_SOCKET
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert "does not answer" in str(find_exporter(path).problem)


def test_a_stale_socket_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    """A dead exporter's socket is replaced; a live exporter's socket, and any other file, stays."""
    path = tmp_path / "run" / "agent.sock"
    first = SocketFile(path, server.SOCKET)
    assert path.parent.stat().st_mode & 0o777 == 0o755
    assert path.stat().st_mode & 0o777 == 0o666
    with pytest.raises(StartupError, match="another exporter does"):
        SocketFile(path, server.SOCKET)
    first.socket.close()  # as by SIGKILL: the file stays
    second = SocketFile(path, server.SOCKET)
    first.close()
    assert path.exists(), "the first one does not remove the second one's file"
    second.close()
    assert not path.exists()
    path.write_text("a file")
    with pytest.raises(StartupError, match="it is not a socket"):
        SocketFile(path, server.SOCKET)
    assert path.read_text() == "a file"
    assert list(path.parent.iterdir()) == [path]


def test_a_report_ends_with_its_process_though_a_child_is_connected(running: Running, stage: Stage) -> None:
    """The end of the connected process ends its report immediately, even if others have the socket open."""
    program = stage.start(("connect", str(running.path)), ("say", report()))
    wait_until(lambda: running.sequence(program.pid) == 1, "the report")
    child = program.fork()
    child.order("say", report(2))
    wait_until(lambda: running.agents and running.rejected("sender"), "the child's message")
    assert (running.sequence(program.pid), running.rejected("sender")) == (1, 1)
    program.end()
    wait_until(lambda: running.agents == () and running.health.connections == 0, "the end")
    assert child.running


def test_the_last_report_of_a_failed_program_is_read_once(running: Running, stage: Stage) -> None:
    """What a program says as it dies of an OutOfMemoryError is in the next reading, and in no other."""
    oom = {"time": 7.0, "framework": "torch", "verdict": "too_big"}
    last = report(2, last_oom=oom, frameworks=[torch(ooms=1)])
    program = stage.start(("connect", str(running.path)), ("say", report()))
    wait_until(lambda: running.health.connections, "the connection")
    program.order("say", last)
    program.end()
    wait_until(lambda: not running.health.connections, "the program's end")
    (agent,) = running.reading().agents
    assert (agent.pid, sure(agent.report).sequence) == (program.pid, 2)
    assert sure(agent.report).last_oom is not None
    assert running.reading().agents == ()


def test_who_ends_waits_for_a_turn_too(
    running: Running, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an ended program has sent is read in the time of agents' messages, and no sooner."""
    program = stage.start(("connect", str(running.path)), ("say", report()))
    wait_until(lambda: running.agents, "the report")
    bucket = running._listener._time_bucket  # noqa: SLF001
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "is_empty", lambda _: True)
        program.end()
        wait_until(lambda: running.inside(lambda: running._listener._queue), "its end")  # noqa: SLF001
        assert running.health.connections == 1
    wait_until(lambda: not running.health.connections, "its turn")


@pytest.mark.parametrize("kernel", ["new", "old"])
def test_a_program_that_ends_as_it_should_leaves_no_report(
    running: Running, monkeypatch: pytest.MonkeyPatch, stage: Stage, kernel: str
) -> None:
    """Without a failed allocation nothing is kept of it, without SO_PEERPIDFD (before Linux 6.5) neither."""
    if kernel == "old":
        monkeypatch.setattr(agent_connection, "_SO_PEERPIDFD", 9999)
    program = stage.start(("connect", str(running.path)), ("say", report()))
    wait_until(lambda: running.agents, "the report")
    program.end()
    wait_until(lambda: not running.health.connections, "the program's end")
    assert running.reading().agents == ()
