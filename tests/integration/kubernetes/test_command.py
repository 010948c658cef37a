"""``vramledger taint`` between a real exporter's web server and an API server that speaks TLS."""

import asyncio
import gzip
import itertools
import json
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest
from msgspec.structs import replace

from tests.support.builders import Shown, device, holding, snapshot
from tests.support.certificates import Authority, Pair
from tests.support.kubernetes_api import NODE, ApiServer, serve_api, write_account
from tests.support.own_addresses import bind_to_interface, own_addresses
from tests.support.requirements import require_root
from tests.support.secured import ALICE, USERS, serve_secured, trusting
from tests.support.serving import served, until
from tests.support.stranger import as_user
from vramledger.errors import StartupError
from vramledger.kubernetes.command import (
    CONDITION,
    MAX_ANSWER_BYTES,
    ExporterAddress,
    KubernetesNode,
    NodeJudge,
    Taint,
    _CheckedConnector,
    _find_listeners,
    ask_exporter,
    follow,
)
from vramledger.model.snapshot import Holding, Snapshot, State

TAINT = Taint("vramledger/leftover", "NoSchedule")
OURS = {"key": TAINT.key, "effect": TAINT.effect}


class Cluster(NamedTuple):
    """The files of a service account, and the certificate of the API server."""

    account: Path
    pair: Pair


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    authority = Authority(tmp_path_factory.mktemp("cluster"))
    account = write_account(tmp_path_factory.mktemp("account"), authority.pair)
    return Cluster(account, authority.sign("apiserver"))


SERIAL = itertools.count(1)


ORPHAN = holding(7, state=State.ORPHANED)


def host_with(*holders: Holding) -> Snapshot:
    """Return a host with these holders, of this moment."""
    return replace(snapshot(device(0, holders, hidden=()), serial=next(SERIAL)), time=time.time())


@asynccontextmanager
async def loop(api: ApiServer, cluster: Cluster, port: int) -> AsyncIterator[None]:
    """Run the loop at a hundred questions a second, with a span of three answers, as a pod of the cluster."""
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(api.port)}
    node = KubernetesNode(NODE, TAINT, environ, cluster.account)
    exporter = ExporterAddress(f"http://127.0.0.1:{port}")
    task = asyncio.create_task(follow(node, exporter, NodeJudge(0.03, 5.0, "boot"), 0.01))
    try:
        yield
        assert not task.done()
    finally:
        task.cancel()


async def test_a_node_is_marked_and_freed_again(cluster: Cluster) -> None:
    """Taint, annotation and condition come with the leftover and go with it; all others stay."""
    shown = Shown(host_with())
    async with serve_api(cluster.pair) as api, served(shown) as client, loop(api, cluster, client.port):
        await until(lambda: api.condition(CONDITION).get("status") == "False")
        untouched = json.dumps(api.taints)
        api.conflicts = 2
        shown.snapshot = host_with(ORPHAN)
        await until(lambda: OURS in api.taints)
        await until(lambda: api.condition(CONDITION)["status"] == "True")
        assert "orphaned pid 7" in api.condition(CONDITION)["message"]
        assert api.node["metadata"]["annotations"]["other"] == "kept"
        assert "[7," in api.node["metadata"]["annotations"][TAINT.key]
        assert {"key": "other", "effect": "NoSchedule"} in api.taints
        assert api.condition("Ready") == {"type": "Ready", "status": "True"}
        shown.snapshot = host_with()
        await until(lambda: OURS not in api.taints)
        await until(lambda: api.condition(CONDITION)["status"] == "False")
        assert json.dumps(api.taints) == untouched
        assert api.node["metadata"]["annotations"] == {"other": "kept"}


async def test_a_frozen_exporter_frees_nobody(cluster: Cluster) -> None:
    """When the exporter goes away, the taint stays and the condition becomes Unknown."""
    async with serve_api(cluster.pair) as api:
        async with served(Shown(host_with(ORPHAN))) as client, loop(api, cluster, client.port):
            await until(lambda: OURS in api.taints)
        async with loop(api, cluster, client.port):
            await until(lambda: api.condition(CONDITION).get("status") == "Unknown")
            assert OURS in api.taints
            assert "does not answer" in api.condition(CONDITION)["message"]


class Counted(Shown):
    """Count how often the snapshot is read."""

    reads = 0

    def __getattribute__(self, name: str) -> object:
        """Count the reads of the snapshot."""
        if name == "snapshot":
            type(self).reads += 1
        return super().__getattribute__(name)


async def test_a_quiet_node_costs_the_api_server_nothing(cluster: Cluster) -> None:
    """A node whose marks are right is read once, and its condition is written once."""
    shown = Counted(host_with())
    async with serve_api(cluster.pair) as api, served(shown) as client:
        async with loop(api, cluster, client.port):
            await until(lambda: api.condition(CONDITION).get("status") == "False")
            asked = len(api.asked)
            before = shown.reads
            await until(lambda: shown.reads > before + 20)
        assert (asked, [each[0] for each in api.asked]) == (2, ["GET", "PATCH"])


@pytest.mark.parametrize("refusal", [200, 401, 403, 500, 503])
async def test_a_refusal_is_tried_again(cluster: Cluster, refusal: int) -> None:
    """An API server that refuses, or cannot be understood, ends nothing: the mark comes when it can."""
    async with serve_api(cluster.pair) as api, served(Shown(host_with(ORPHAN))) as client:
        api.refuse = refusal
        async with loop(api, cluster, client.port):
            await until(lambda: api.refused > 5)
            assert OURS not in api.taints
            api.refuse = 0
            await until(lambda: OURS in api.taints)


def test_outside_a_pod_it_says_so(tmp_path: Path) -> None:
    """Without a token it ends with one line that names what runs it."""
    with pytest.raises(StartupError, match=r"nodeTaint\.enabled=true"):
        KubernetesNode(NODE, TAINT, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path)
    with pytest.raises(StartupError, match="not a pod"):
        KubernetesNode(NODE, TAINT, {}, write_account(tmp_path, Authority(tmp_path).pair))


BOMB = gzip.compress(bytes(2**26))


@pytest.mark.parametrize(
    ("head", "body", "said"),
    [
        ("Content-Encoding: gzip\r\nContent-Length: {}", BOMB, "does not answer"),
        ("Content-Encoding: gzip\r\nConnection: close", BOMB, "does not answer"),
        ("Connection: close", bytes(MAX_ANSWER_BYTES + 1), "too long"),
        ("Content-Length: {}", b"[" * 10**6, "does not answer"),
    ],
    ids=["bomb", "bomb without a length", "without an end", "deep"],
)
async def test_an_answer_has_a_measure(head: str, body: bytes, said: str) -> None:
    """Nothing is unpacked, and no more is read than an exporter sends."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\n{head.format(len(body))}\r\n\r\n".encode() + body)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = await ask_exporter(ExporterAddress(f"http://127.0.0.1:{port}"))
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert (found.verdict, said in found.message) == ("cannot-tell", True)
    assert grown < 40 * 1024, "KiB"


OWN = "an address of its own"


@pytest.mark.parametrize(
    ("host", "bound", "said"),
    [
        *((host, False, "a program of user 12345") for host in ("127.0.0.1", "[::1]", "localhost", OWN)),
        ("127.9.9.9", True, "a program of user 12345"),
        (OWN, True, "it is not known who"),
    ],
)
async def test_a_stranger_gets_no_password_and_marks_no_node(
    tmp_path: Path, host: str, bound: bool, said: str
) -> None:
    """Another user of the host who listens at the exporter's port, however, is not asked anything."""
    require_root()
    (tmp_path / "username").write_text("prometheus")
    (tmp_path / "password").write_text("secret")
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.read(4096))
        writer.close()

    host = own_addresses()[0] if host == OWN else host
    (family, *_, address), *_ = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    with as_user(12345):  # the kernel takes a socket's user when it is made
        listening = socket.socket(family)
        if bound:
            bind_to_interface(listening, host)
        listening.bind(address)
    async with await asyncio.start_server(listen, sock=listening):
        url = f"http://{host}:{listening.getsockname()[1]}"
        for folder in (tmp_path, None):
            found = await ask_exporter(ExporterAddress(url, credentials=folder))
            assert said in found.message
    assert not any(heard)


async def test_who_takes_the_port_is_not_asked() -> None:
    """Who listens must have done so before we connected: meanwhile a stranger may have had the port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        url = f"http://127.0.0.1:{address[1]}"
        before = _find_listeners(url, secret=False)
    assert before is not None
    with socket.create_server(address):
        async with aiohttp.ClientSession(connector=_CheckedConnector(before, secret=False)) as session:
            with pytest.raises(ValueError, match="it is not known who listens"):
                await session.get(url)


def test_a_password_crosses_no_network_in_the_clear(tmp_path: Path) -> None:
    """Who listens elsewhere is not known without TLS."""
    (tmp_path / "username").write_text("prometheus")
    (tmp_path / "password").write_text("secret")
    found = asyncio.run(ask_exporter(ExporterAddress("http://192.0.2.1:10839", credentials=tmp_path)))
    assert "no password is sent" in found.message


async def test_it_reaches_an_exporter_with_tls_and_passwords(tmp_path: Path) -> None:
    """The folder of credentials lets it in: its authority, its name in the certificate, user and password."""
    authority = Authority(tmp_path)
    pair = authority.sign("exporter", "DNS:vramledger")
    tls = f"tls_server_config: {{cert_file: {pair.certificate}, key_file: {pair.key}}}\n"
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(authority.pair.certificate.read_bytes())
    async with serve_secured(tmp_path / "web.yml", USERS + tls, trusting(authority.pair)) as exporter:
        address = ExporterAddress(f"https://127.0.0.1:{exporter.port}", "vramledger", folder)
        assert "401" in (await ask_exporter(address)).message
        (folder / "username").write_text(ALICE[0])
        (folder / "password").write_text(f"{ALICE[1]}\n")
        # It was let in: what it read is an old sample.
        assert "not new" in (await ask_exporter(address)).message
        assert "certificate" in (await ask_exporter(replace(address, server_name=None))).message
