"""Any bytes to an exporter with TLS and passwords: it continues, and strangers learn nothing."""

import base64
import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.integration.fuzz.conftest import FUZZ
from tests.integration.fuzz.test_http import PATHS, REQUEST
from tests.support.certificates import Authority
from tests.support.exporter import QUICK, Exporter, Page, check, serving
from tests.support.secured import ALICE, USERS, header, trusting, write_config
from tests.support.standin.library import StandIn
from tests.support.waiting import wait_until
from vramledger import __version__

WAIT = 30.0
TELLING = ("vramledger", "aiohttp", "python", __version__)
"""Words that no stranger may read, in small letters."""

STATUSES = {b"400", b"401", b"417", b"429", b"503"}
"""The allowed answers to a stranger: malformed, no login, no expectation, too often, too many."""


class Guarded(NamedTuple):
    """An exporter with TLS and one user, and how this user and others send requests."""

    exporter: Exporter
    trusted: ssl.SSLContext

    def plain(self) -> socket.socket:
        """Connect, and leave the handshake to the caller."""
        connection = socket.create_connection(("127.0.0.1", self.exporter.port), timeout=WAIT)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def secure(self) -> ssl.SSLSocket:
        """Connect, and complete the handshake."""
        return self.trusted.wrap_socket(self.plain(), server_hostname="localhost")

    def friend(self, path: str = "/-/healthy") -> str:
        """Return the answer to the user, who must be allowed."""
        where = ("localhost", self.exporter.port)
        with closing(http.client.HTTPSConnection(*where, timeout=WAIT, context=self.trusted)) as connection:
            connection.request("GET", path, headers=header(ALICE))
            answer = connection.getresponse()
            text = answer.read().decode()
        assert answer.status == 200, text
        return text

    def well(self) -> None:
        """Assert that the user is served a page that is right."""
        page = Page(self.friend("/metrics"))
        check(page)
        assert page.up

    def stranger(self, data: bytes, wait: float = 0.05) -> bytes:
        """Send bytes within TLS, and return the answer."""
        answer = b""
        with self.secure() as connection, suppress(OSError):
            connection.sendall(data)
            connection.settimeout(wait)
            while more := connection.recv(1 << 16):
                answer += more
        return answer


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, standin_library: Path) -> Iterator[Guarded]:
    """Run one exporter for all tests here; its end shows whether it logged errors."""
    home = tmp_path_factory.mktemp("guarded")
    authority = Authority(home)
    pair = authority.sign("server")
    web = home / "web.yml"
    write_config(web, f"tls_server_config:\n  cert_file: {pair.certificate}\n  key_file: {pair.key}\n{USERS}")
    with (
        StandIn(home, standin_library, devices=2) as standin,
        serving(*QUICK, f"--web.config.file={web}", driver=standin.env()) as running,
    ):
        each = Guarded(running, trusting(authority.pair))
        wait_until(lambda: "vramledger_up 1" in each.friend("/metrics"), "data")
        yield each
        each.well()
    assert "Traceback" not in running.ended.log


def nothing_told(answer: bytes) -> None:
    """Assert that an answer to a stranger reveals only that a server is here."""
    shown = answer.decode("latin-1").lower()
    assert [word for word in TELLING if word in shown] == []
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/1.") and b" 100 " not in line:
            assert line.split()[1] in STATUSES, answer


@FUZZ
@given(st.lists(REQUEST, min_size=1, max_size=3).map(b"".join) | st.binary(max_size=200))
def test_a_stranger_within_tls_learns_nothing(guarded: Guarded, data: bytes) -> None:
    """Malformed requests, also several at once: no answer names us, and the user is served."""
    nothing_told(guarded.stranger(data))
    assert guarded.friend()


LOGINS = st.tuples(st.sampled_from(["Basic", "basic", "Bearer", "", "Digest"]), st.binary(max_size=90)).map(
    lambda pair: f"{pair[0]} {base64.b64encode(pair[1]).decode()}"
) | st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60)


@FUZZ
@given(LOGINS, PATHS)
def test_no_login_but_the_right_one_opens(guarded: Guarded, login: str, path: str) -> None:
    """No other header is accepted, whatever it contains and whichever path is requested."""
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\nConnection: close\r\n\r\n"
    nothing_told(guarded.stranger(request.encode("latin-1", "replace"), wait=WAIT))
    assert guarded.friend()


@FUZZ
@given(
    st.sampled_from(["GET", "HEAD", "POST", "OPTIONS", "BREW"]),
    st.lists(st.sampled_from(["Accept-Encoding: gzip", "Expect: x", "Range: bytes=0-", "Cookie: a=b"])),
    st.sampled_from(["/metrics", "/", "/-/healthy", "/api/v1/events", "/page/1/app.js"]),
)
def test_all_paths_look_the_same(guarded: Guarded, method: str, headers: list[str], known: str) -> None:
    """A path that exists and one that does not have the same answer to the same request."""
    answers = set()
    for path in (known, "/there/is/no/such/path"):
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers, "", ""]
        answer = guarded.stranger("\r\n".join(lines).encode(), wait=WAIT)
        answers.add(b"\r\n".join(line for line in answer.split(b"\r\n") if not line.startswith(b"Date:")))
    assert len(answers) == 1
    assert answers != {b""}


def hello() -> bytes:
    """Return the first message of a TLS client."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


HELLO = hello()


@FUZZ
@given(
    st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), max_size=4),
    st.integers(0, len(HELLO)),
    st.binary(max_size=100),
)
def test_a_handshake_of_any_bytes_is_borne(
    guarded: Guarded, changes: list[tuple[int, int]], length: int, tail: bytes
) -> None:
    """A handshake that is changed, cut off or followed by garbage affects only its own connection."""
    data = bytearray(HELLO)
    for place, value in changes:
        data[place] = value
    with guarded.plain() as connection, suppress(OSError):
        connection.sendall(bytes(data[:length]) + tail)
        connection.settimeout(0.02)
        nothing_told(connection.recv(1 << 16))
    assert guarded.friend()


def test_huge_requests_are_borne_within_tls(guarded: Guarded) -> None:
    """Requests of a megabyte without a login are refused or dropped, and keep no memory."""
    before = guarded.exporter.process.memory_info().rss
    for data in (
        b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nAuthorization: Basic " + b"b" * 1_000_000 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + b"c" * 1_000_000,
    ):
        for _ in range(5):
            nothing_told(guarded.stranger(data, wait=0.2))
    guarded.well()
    assert guarded.exporter.process.memory_info().rss < before + 20 * 2**20


def test_a_thousand_silent_connections_keep_nobody_out(guarded: Guarded) -> None:
    """Clients that never shake hands, stop in the middle, or then say nothing take little, and go."""
    before = guarded.exporter.process.memory_info().rss
    with ExitStack() as stack:
        for number in range(1000):
            if number % 10 == 0:
                stack.enter_context(guarded.secure())
                continue
            connection = stack.enter_context(guarded.plain())
            if number % 2:
                connection.sendall(HELLO[: number % len(HELLO)])
        guarded.well()
        assert guarded.exporter.process.memory_info().rss < before + 80 * 2**20
    wait_until(lambda: guarded.exporter.process.num_fds() < 100, "their descriptors to be given back")
