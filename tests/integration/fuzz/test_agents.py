"""Any bytes on the agents' socket of a running exporter: the page stays right, and other agents report."""

import array
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.fuzz.conftest import FUZZ
from tests.integration.fuzz.test_tracker import JSON, places, spoilt
from tests.support.agent_client import GIB, connect, report, torch
from tests.support.exporter import QUICK, Exporter, Page, serving
from tests.support.players.stage import Player, Stage
from tests.support.standin.library import StandIn
from tests.support.waiting import wait_until
from vramledger_agent.protocol.messages import MAX_MESSAGE_BYTES

ME = os.getpid()
HELD = 3 * GIB
MIB = 2**20

FULL = report(
    7, interval=60.0, errors={"torch": 1}, consents=["reclaim"], visible={"CUDA_VISIBLE_DEVICES": "0"},
    collector={"enabled": True, "collections": 4},
    frameworks=[
        torch(categories={"gradients": 1}, ooms=1), {"framework": "jax", "devices": [{"ordinal": 0}]},
    ],
    last_oom={"time": 1.0, "framework": "torch", "ordinal": 0, "requested": 5, "verdict": "too_big"},
)  # fmt: skip
"""A report with every field, to be damaged."""

MESSAGES: list[dict[str, Any]] = [
    FULL,
    {"version": 1, "ask": "devices"},
    {"version": 1, "ask": "agents"},
    {"version": 1, "ask": "reclaim", "to": ME},
    {"version": 1, "ask": "snapshot", "to": 1, "seconds": 1},
]
CHANGED = st.builds(
    lambda message, changes: spoilt(message[0], message[1], changes).encode(),
    st.sampled_from([(each, places(each)) for each in MESSAGES]),
    st.lists(st.tuples(st.integers(0, 10**6), JSON | st.integers(-(2**70), 2**70)), max_size=3),
)
CUT = st.tuples(CHANGED, st.integers(0, 2000)).map(lambda pair: pair[0][: pair[1]])
DATA = st.lists(CHANGED | CUT | st.binary(max_size=200), min_size=1, max_size=4)


class Town(NamedTuple):
    """An exporter, an honest program with an agent, and this process, which holds memory too."""

    exporter: Exporter
    path: Path
    honest: Player

    def right(self) -> Page:
        """Assert that the page is right, and has the figures of the honest agent."""
        page = self.exporter.scrape()
        assert page.up
        assert page.value("torch_reserved_bytes", pid=self.honest.pid) == GIB
        assert page.value("process_memory_bytes", pid=self.honest.pid) == HELD
        assert page.value("process_memory_bytes", pid=ME) == MIB
        for name, key in page.samples:
            pid = dict(key).get("pid")
            assert pid in (None, str(self.honest.pid), str(ME)), f"{name} of {pid}, which holds nothing"
        return page

    def send(self, *data: bytes, descriptors: int = 0) -> None:
        """Send messages on a separate connection, and close it without reading any answer."""
        with connect(self.path) as connection:
            connection.settimeout(1.0)  # after its burst a connection is not read immediately
            for each in data:
                ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * descriptors))]
                with suppress(OSError):  # it was closed because of an earlier message
                    connection.sendmsg([each], ancillary if descriptors else [])


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory, standin_library: Path) -> Iterator[Town]:
    """Run one exporter for all tests here; its end shows whether it logged errors."""
    with (
        tempfile.TemporaryDirectory(prefix="agents-") as directory,
        StandIn(tmp_path_factory.mktemp("standin"), standin_library) as standin,
    ):
        path = Path(directory, "agent.sock")
        with serving(*QUICK, f"--agent.socket={path}", driver=standin.env()) as running:
            wait_until(path.exists, "the socket")
            with Stage() as stage:
                said = report(1, interval=600.0, frameworks=[torch()])
                honest = stage.start(("connect", str(path)), ("say", said))
                standin.device(0).set_processes([(honest.pid, HELD), (ME, MIB)])
                running.until(lambda page: page.values("torch_reserved_bytes", pid=honest.pid), "the report")
                each = Town(running, path, honest)
                yield each
                each.right()
    assert "Traceback" not in running.ended.log


@FUZZ
@given(DATA, st.integers(0, 6))
def test_any_message_is_borne(town: Town, data: list[bytes], descriptors: int) -> None:
    """Damaged, truncated or invalid messages affect only their sender."""
    town.send(*data, descriptors=descriptors if descriptors > 3 else 0)
    town.right()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * MAX_MESSAGE_BYTES,
        b'{"frameworks":' * (MAX_MESSAGE_BYTES // 14),
        b'{"version":1,"sequence":1' + b"0" * (MAX_MESSAGE_BYTES - 26) + b"}",
        json.dumps(report(frameworks=[torch(ordinal) for ordinal in range(500)])).encode(),
        json.dumps({**FULL, "errors": {f"name{number}": number for number in range(3000)}}).encode(),
        json.dumps({**FULL, "pid": 1, "uid": 0, "start": 1}).encode(),
        b'{"version":1,"version":1e999,"sequence":NaN,"interval":-Infinity}',
        b"\0" * MAX_MESSAGE_BYTES,
        b"x" * (4 * MAX_MESSAGE_BYTES),
    ],
    ids="brackets objects number devices names another's-pid no-numbers zeros too-long".split(),
)
def test_huge_and_deep_messages_are_borne(town: Town, data: bytes) -> None:
    """The largest or deepest possible message keeps no memory, and no other client waits."""
    before = town.exporter.process.memory_info().rss
    for _ in range(20):
        with suppress(OSError):
            town.send(data)
    town.right()
    assert town.exporter.process.memory_info().rss < before + 20 * MIB


def test_thousands_of_connections_are_borne(town: Town) -> None:
    """A program with as many connections as possible and half a message on each blocks no other."""
    before = town.exporter.process.memory_info().rss
    with ExitStack() as stack:
        for number in range(2000):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.setblocking(False)
            with suppress(OSError):  # the kernel's queue is full, or the user has all its connections
                connection.connect(str(town.path))
                if number % 3 == 0:
                    connection.send(json.dumps(FULL).encode()[: number % 100])
        town.right()
    wait_until(lambda: town.exporter.process.num_fds() < 100, "their descriptors to be given back")
    town.right()
    assert town.exporter.process.memory_info().rss < before + 20 * MIB
