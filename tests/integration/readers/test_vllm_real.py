"""Whom the exporter asks for the KV cache of a holder: real processes, sockets and requests."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.players.stage import Stage
from tests.support.ports import free_port
from tests.support.requirements import require_root, require_tool
from tests.support.sure import sure
from tests.support.vllm_server import metrics_page, serve_vllm
from tests.support.waiting import wait_until
from vramledger.model.holder_facts import KvCache
from vramledger.model.reading import ProcessRow
from vramledger.readers import vllm
from vramledger.readers.hosts.sockets import Listener
from vramledger.readers.hosts.stat import read_row
from vramledger.readers.vllm import KEEP, READ_INTERVAL, STUCK_AFTER, KvCacheReader, Server, find_server

PROC = "/proc"


class Asked:
    """A reader with a clock, and its rounds one at a time."""

    def __init__(self, **how: Callable[[Server], bytes | None]) -> None:
        self.now = 0.0
        self.reader = KvCacheReader(PROC, clock=lambda: self.now, **how)

    def round(self, *rows: ProcessRow) -> tuple[KvCache, ...]:
        self.now += READ_INTERVAL
        return self.end(*rows)

    def end(self, *rows: ProcessRow) -> tuple[KvCache, ...]:
        """Return what is known at the end of the round that begins now, or is under way."""
        self.reader.seconds = None
        known: list[tuple[KvCache, ...]] = []

        def ended() -> bool:
            known[:] = [self.reader.update(rows)]
            return self.reader.seconds is not None

        wait_until(ended, "the end of the round")
        return known[0]


def row(pid: int) -> ProcessRow:
    return sure(read_row(PROC, pid))


def listening(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


@pytest.mark.parametrize("host", ["127.0.0.1", "", "127.0.0.2"])
def test_the_engine_and_the_server_have_the_servers_figures(tmp_path: Path, host: str) -> None:
    """The process that a server starts has its KV cache, wherever on this host the server listens."""
    with serve_vllm(tmp_path, host=host) as server:
        server.say(metrics_page(0.5, 2**30, 1000))
        engine, main = row(server.engine), row(server.pid)
        expected = tuple(KvCache(each.pid, each.start, 0.5, 2**30, 1000) for each in (engine, main))
        assert Asked().round(engine, main) == expected
        (request,) = server.asked()
        assert request.startswith("/metrics ")
        assert "Authorization" not in request


def test_nobody_is_asked_who_is_not_a_holders_own_server(tmp_path: Path, stage: Stage) -> None:
    """A program that did not start the holder is not asked, also where it listens at the server's port."""
    other = stage.start()
    with serve_vllm(tmp_path / "a", listens=False) as silent, listening(silent.port) as foreign:
        foreign.settimeout(0)
        assert Asked().round(row(silent.engine), row(other.pid)) == ()
        with pytest.raises(BlockingIOError):
            foreign.accept()


def test_a_second_socket_at_the_port_makes_the_answer_uncertain(tmp_path: Path) -> None:
    """Where another process listens at the same port, at another address, nobody is asked."""
    with serve_vllm(tmp_path, host="127.0.0.2") as server, listening(server.port):
        assert find_server(PROC, row(server.engine)) is None
    with serve_vllm(tmp_path / "again") as server:
        assert find_server(PROC, row(server.engine)) is not None


def test_another_users_server_is_not_asked(tmp_path: Path, stage: Stage) -> None:
    """A server above a holder of another user is not the holder's own."""
    require_root()
    with serve_vllm(tmp_path) as server:
        assert find_server(PROC, row(server.engine)) is not None
        assert find_server(PROC, row(stage.start(user=65534).pid)._replace(ppid=server.pid)) is None


def test_a_server_in_another_network_namespace_is_not_asked(tmp_path: Path) -> None:
    """At the same address in our own namespace somebody else may listen."""
    require_root()
    require_tool("unshare")
    port = free_port()
    with listening(port), serve_vllm(tmp_path, host="", wrapper=["unshare", "--net"], port=port) as server:
        assert find_server(PROC, row(server.engine)) is None


def test_an_answer_of_another_program_counts_for_nothing(tmp_path: Path) -> None:
    """If the server no longer listens after the answer, somebody else may have given it."""
    with serve_vllm(tmp_path) as server:
        engine = row(server.engine)

        def answer_and_end(_: Server) -> bytes:
            os.kill(server.pid, 9)
            wait_until(lambda: find_server(PROC, engine) is None, "the end")
            return metrics_page().encode()

        assert Asked(request=answer_and_end).round(engine) == ()


def test_figures_are_gone_with_the_answers(tmp_path: Path) -> None:
    """A server that stops to answer, and a thread that hangs, leave no old figures behind."""
    with serve_vllm(tmp_path) as server:
        engine, asked = row(server.engine), Asked()
        assert asked.round(engine)
        asked.now += KEEP + 1
        assert asked.reader.update([engine]) == ()
        assert asked.end(engine)
        assert asked.reader.update([engine._replace(start=1)]) == ()
        server.say("<html>")
        assert asked.round(engine) == ()


def test_a_round_that_hangs_is_given_up(tmp_path: Path) -> None:
    """Its figures are those of nobody, the collector has no success, and what comes too late is not new."""
    hangs, go_on = threading.Event(), threading.Event()
    pages = iter([(0.5, False), (0.9, True)])

    def answer_late(_: Server) -> bytes:
        usage, waits = next(pages, (0.6, False))
        if waits:
            hangs.set()
            go_on.wait()
        return metrics_page(usage).encode()

    with serve_vllm(tmp_path) as server:
        engine, asked = row(server.engine), Asked(request=answer_late)
        shown = []

        def usage() -> float | None:
            (known,) = asked.reader.update([engine]) or (None,)
            shown.append(known and known.usage)
            return shown[-1]

        try:
            assert asked.round(engine)[0].usage == 0.5
            asked.now += READ_INTERVAL
            assert usage() == 0.5, "a round under way takes nothing away"
            assert hangs.wait(30)
            asked.now += STUCK_AFTER
            wait_until(lambda: usage() is None, "the round to be given up")
            asked.now += KEEP
            assert (usage(), asked.reader.answers) == (None, False)
        finally:
            go_on.set()

        def read_again() -> bool:
            asked.now += READ_INTERVAL
            return usage() == 0.6

        wait_until(read_again, "a new round")
        assert asked.reader.answers is True
        assert 0.9 not in shown


def test_a_slow_or_endless_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that sends a little for ever, or too much, has no figures, and its time is limited."""
    monkeypatch.setattr(vllm, "TIMEOUT", 0.3)
    with serve_vllm(tmp_path) as server:
        found = sure(find_server(PROC, row(server.engine)))
        assert vllm.request_metrics(found.listener)
        (server.home / "slow").touch()
        assert vllm.request_metrics(found.listener) is None
        (server.home / "slow").unlink()
        monkeypatch.setattr(vllm, "MAX_BYTES", 500)
        assert vllm.request_metrics(found.listener) is None
    assert vllm.request_metrics(found.listener) is None


def test_silent_servers_leave_requests_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that did not answer comes after those that did."""
    monkeypatch.setattr("vramledger.readers.vllm.MAX_SERVERS", 1)
    with serve_vllm(tmp_path / "a") as one, serve_vllm(tmp_path / "b") as other:
        first, second = sorted((one, other))
        first.say("")
        (first.home / "page").unlink()
        asked, rows = Asked(), (row(first.engine), row(second.engine))
        assert [[each.pid for each in asked.round(*rows)] for _ in range(2)] == [[], [second.engine]]


def test_each_of_many_servers_has_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more servers than a round asks, those that have waited longest are asked next."""
    monkeypatch.setattr("vramledger.readers.vllm.MAX_SERVERS", 1)
    with serve_vllm(tmp_path / "a") as one, serve_vllm(tmp_path / "b") as other:
        asked, rows = Asked(), (row(one.engine), row(other.engine))
        seen = [each.pid for _ in range(4) for each in asked.round(*rows)]
        assert sorted(seen[:2]) == sorted(seen[2:]) == sorted((one.engine, other.engine))


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 17 + b"\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 5000,
        b"\0" * 100_000,
        b"",
    ],
)
def test_an_impossible_answer_is_none(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a server sends, it costs its own figures alone."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(socket, "create_connection", lambda *_: ours)
    with theirs:
        theirs.sendall(reply)
        theirs.shutdown(socket.SHUT_WR)
        assert vllm.request_metrics(Listener("127.0.0.1", 1, 1)) in (None, b"x")
