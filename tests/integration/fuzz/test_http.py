"""Any bytes over the network: the exporter continues, and answers the next scrape as usual."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.fuzz.conftest import FUZZ
from tests.support.exporter import Exporter, sampling
from tests.support.requirements import require_tool
from tests.support.standin.library import StandIn

DOCUMENTS = "/api/v1/ledger /api/v1/history /api/v1/leftovers /api/v1/events".split()
PLACES = ("/metrics", "/", *DOCUMENTS, "/-/ready", "/page/1/app.js", "*", "")
PATHS = st.sampled_from(PLACES) | st.text(max_size=30)
WORDS = "gzip chunked 0 -1 99999999999999999999 100-continue close upgrade".split()
TOKEN = st.text(max_size=20) | st.sampled_from([*WORDS, "text/plain;q=\x00"])
HEADERS = (
    "Host Accept Accept-Encoding Content-Length Transfer-Encoding Connection Expect Range"
    " Authorization Upgrade Cookie If-None-Match X-Forwarded-For"
).split()
HEADER = st.tuples(st.sampled_from(HEADERS) | st.text(max_size=10), TOKEN).map(": ".join)
QUERIES = ("?collect[]=ledger", "?name[]=", "?exclude[]=x&exclude[]=y", "?%zz")
REQUEST = st.builds(
    lambda method, path, query, version, headers, body: (
        "\r\n".join([f"{method} {path}{query} {version}", *headers, "", ""]) + body
    ).encode("utf-8", "surrogatepass"),
    st.sampled_from("GET HEAD POST PUT OPTIONS TRACE CONNECT PRI G\x00T".split()) | st.text(max_size=6),
    PATHS,
    st.text(max_size=20) | st.sampled_from(QUERIES),
    st.sampled_from(["HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", ""]),
    st.lists(HEADER, max_size=5),
    st.text(max_size=30),
)


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory, standin_library: Path) -> Iterator[Exporter]:
    """Run one exporter for all tests here; its end shows whether it logged errors."""
    with (
        StandIn(tmp_path_factory.mktemp("standin"), standin_library, devices=2) as standin,
        sampling(driver=standin.env()) as running,
    ):
        yield running
        assert running.scrape().up
    assert "Traceback" not in running.ended.log


def connect(exporter: Exporter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", exporter.port), timeout=5)


def send(exporter: Exporter, data: bytes, *, wait: float = 0.2) -> bytes:
    with connect(exporter) as connection:
        with suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(wait)
        with suppress(OSError):
            return connection.recv(4096)
    return b""


@FUZZ
@given(st.lists(REQUEST, min_size=1, max_size=3).map(b"".join) | st.binary(max_size=200))
def test_any_bytes_are_borne(exporter: Exporter, data: bytes) -> None:
    """Malformed requests, also several at once, affect only their own connection; no answer is a 500."""
    assert b" 500 " not in send(exporter, data, wait=0.05).partition(b"\r\n")[0]
    assert exporter.get("/-/healthy")[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: " + b"b" * 1_000_000 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
        b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
        + b"c" * 1_000_000,
        b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"fffffff\r\n" + b"d" * 1_000_000,
        b"GET /metrics?" + b"name[]=x&" * 5_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["path", "header", "headers", "body", "chunk", "query"],
)
def test_huge_requests_are_borne(exporter: Exporter, data: bytes) -> None:
    """A request of a megabyte is refused or dropped, and keeps no memory."""
    before = exporter.process.memory_info().rss
    for _ in range(5):
        send(exporter, data)
    assert exporter.scrape().up
    assert exporter.process.memory_info().rss < before + 20 * 2**20


def test_unfinished_heads_keep_no_memory(exporter: Exporter) -> None:
    """Two hundred heads of a megabyte that do not end cost a few megabytes, and no scrape."""
    before = exporter.process.memory_info().rss
    head = b"".join(b"X-%d: %s\r\n" % (number, b"x" * 7900) for number in range(120))
    with ExitStack() as stack:
        for _ in range(200):
            connection = stack.enter_context(connect(exporter))
            with suppress(OSError):
                connection.sendall(b"GET / HTTP/1.1\r\n" + head)
        assert exporter.scrape().up
        assert exporter.process.memory_info().rss < before + 40 * 2**20


def test_pipelined_requests_are_answered_in_turn(exporter: Exporter) -> None:
    """A thousand requests in one write get a thousand answers, and other clients still get theirs."""
    request = b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=20) as connection:
        connection.sendall(request * 999 + request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert exporter.scrape().up
        answers = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answers.count(b"HTTP/1.1 200 OK") == 1000


def test_where_descriptors_are_few_scrapes_have_theirs(
    tmp_path_factory: pytest.TempPathFactory, standin_library: Path
) -> None:
    """With 256 descriptors, clients that expect, view, wait or say nothing leave room for a scrape."""
    clients = (
        b"GET %b HTTP/1.1\r\nHost: localhost%b\r\n\r\n" % each
        for each in ((b"/metrics", b"\r\nExpect: x"), (b"/api/v1/events", b""), (b"/-/healthy", b""))
    )
    few = [str(require_tool("prlimit")), "--nofile=256:256"]
    with (
        StandIn(tmp_path_factory.mktemp("few"), standin_library, devices=1) as standin,
        sampling(driver=standin.env(), wrapper=few) as running,
    ):
        for data in (b"", *clients):
            with ExitStack() as stack:
                for _ in range(300):
                    connection = stack.enter_context(connect(running))
                    with suppress(OSError):
                        connection.sendall(data)
                assert running.next_sample().up
