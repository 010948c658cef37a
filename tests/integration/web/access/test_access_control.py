"""Which requests are allowed, what a stranger sees, and what happens when the file changes."""

import asyncio
import logging
import os
import re
import ssl
import sys
from functools import partial
from pathlib import Path
from textwrap import indent

import aiohttp
import pytest
from msgspec.structs import replace

from tests.support.builders import Shown
from tests.support.certificates import Authority
from tests.support.secured import (
    ALICE,
    HASH,
    USERS,
    SecuredExporter,
    header,
    serve_secured,
    tls,
    trusting,
    write_config,
)
from tests.support.serving import LOOPBACK, Answer, until, until_answered
from tests.support.sure import sure
from vramledger.errors import StartupError
from vramledger.web import page_stream
from vramledger.web.access import access_control
from vramledger.web.access.tls import AccessSettings
from vramledger.web.app import serve

if sys.version_info < (3, 11):
    # If a TLS handshake was refused, asyncio leaves the connection to the garbage collector.
    pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

PATHS = (
    *("/metrics", "/", "/runbooks/GpuMemoryDead", "/api/v1/ledger", "/-/healthy", "/-/ready"),
    *("/nowhere", "/metrics?collect[]=x"),
)


def value(page: str, name: str) -> float | None:
    found = re.search(rf"^vramledger_{re.escape(name)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else None


def loaded(answer: Answer) -> float | None:
    """Return whether the newest configuration is in use, as a page says it."""
    return value(answer.text, "web_config_last_reload_successful")


async def test_a_stranger_learns_nothing(file: Path) -> None:
    """Without the password every path and method has the same answer, which does not say what we are."""
    async with serve_secured(file, USERS) as exporter:
        answers = set()
        asked = [(path, None, method) for path in PATHS for method in ("GET", "POST", "OPTIONS", "PUT")]
        wrong = [("/metrics", who, "GET") for who in (("alice", "x"), ("eve", "wonder"))]
        for path, auth, method in (*asked, *wrong):
            answer = await exporter.ask(path, auth, method)
            headers = [each for each in answer.headers.items() if each[0] not in ("Date", "Connection")]
            answers.add((answer.status, answer.text, tuple(sorted(headers))))
        assert len(answers) == 1
        ((status, text, shown),) = answers
        assert (status, text) == (401, "Unauthorized\n")
        assert {name for name, _ in shown} == {
            *("Content-Length", "Content-Type", "WWW-Authenticate", "X-Content-Type-Options")
        }
        assert "vramledger" not in str(answers)
        assert (await exporter.ask("/-/healthy", ALICE)).text == "vramledger is healthy.\n"
        assert (await exporter.ask("/nowhere", ALICE)).status == 404


@pytest.mark.parametrize("sent", [
    "Basic", "Basic ", "Basic !!!", "Basic YWxpY2U=", "Bearer YWxpY2U6d29uZGVy", "basic", "Basic /w==",
])  # fmt: skip
async def test_what_is_no_login_is_none(file: Path, sent: str) -> None:
    """A header without name and password is refused like no header, and causes no error."""
    async with serve_secured(file, USERS) as exporter, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        async with session.get(url, headers={"Authorization": sent}) as answer:
            assert answer.status == 401


async def test_refusals_are_counted(file: Path) -> None:
    """The metrics count the refusals by reason; an allowed user stays allowed."""
    async with serve_secured(file, USERS) as exporter:
        assert (await exporter.ask(auth=ALICE)).status == 200
        statuses = [(await exporter.ask(auth=("alice", f"{n}"))).status for n in range(12)]
        assert statuses == [401] * 10 + [429] * 2
        page = (await exporter.ask("/metrics?name[]=vramledger_web_refused_requests_total", ALICE)).text
        assert value(page, 'web_refused_requests_total{reason="password"}') == 10
        assert value(page, 'web_refused_requests_total{reason="failures"}') == 2


async def test_the_headers_of_the_file_are_on_every_answer(file: Path) -> None:
    """Headers are added to successes and errors, and the page keeps its own policy."""
    headers = """{X-Frame-Options: deny, Content-Security-Policy: "default-src 'self'"}"""
    async with serve_secured(file, f"{USERS}http_server_config:\n  headers: {headers}\n") as exporter:
        for auth, path in ((None, "/metrics"), (ALICE, "/metrics"), (ALICE, "/nowhere")):
            answer = await exporter.ask(path, auth)
            assert answer.headers["X-Frame-Options"] == "deny"
            assert answer.headers["Content-Security-Policy"] == "default-src 'self'"
        page = await exporter.ask("/", ALICE)
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]


async def test_the_rate_limit_holds(file: Path) -> None:
    """As many requests as the bucket holds are answered at once; the next ones get 429."""
    limits = {"1h, burst: 3": [200, 200, 200, 429, 429], "1s, burst: 0": [429], "0, burst: 0": [200]}
    for interval, statuses in limits.items():
        async with serve_secured(file, f"rate_limit: {{interval: {interval}}}") as exporter:
            assert [(await exporter.ask()).status for _ in statuses] == statuses


def test_the_rate_limit_refills() -> None:
    """One token is added in each interval, up to the size of the bucket."""
    bucket = sure(access_control._bucket(AccessSettings(interval=0.5, burst=2), 0.0))  # noqa: SLF001
    assert [bucket.consume(100.0) for _ in range(3)] == [True, True, False]
    assert [bucket.consume(100.75) for _ in range(2)] == [True, False]
    assert bucket.wait == 0.25


async def test_tls(file: Path, authority: Authority) -> None:
    """With a certificate all is HTTPS; plain HTTP and older TLS versions get nothing."""
    secure = trusting(authority.pair)
    async with serve_secured(file, tls("  min_version: TLS13\n") + USERS, secure) as exporter:
        assert (await exporter.ask()).status == 401
        assert (await exporter.ask(auth=ALICE)).status == 200
        with pytest.raises(aiohttp.ClientError):
            await SecuredExporter(exporter.port).ask()
        secure.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(aiohttp.ClientError):
            await exporter.ask()


@pytest.mark.parametrize(
    "more",
    [
        "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256]\n  max_version: TLS12\n",
        "  curve_preferences: [CurveP384]\n",
        "  curve_preferences: [CurveP256, CurveP521]\n",
        "  curve_preferences: [X25519]\n",
        "  prefer_server_cipher_suites: false\n",
    ],
)
async def test_tls_as_the_file_says(file: Path, authority: Authority, more: str) -> None:
    """Suites and curves of the file are used."""
    if "X25519" in more:
        try:
            ssl.create_default_context().set_ecdh_curve("X25519")
        except (ValueError, ssl.SSLError):
            pytest.skip("this Python's OpenSSL takes X25519 for no curve; the file's error says so")
    async with serve_secured(file, tls(more), trusting(authority.pair)) as exporter:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", exporter.port, ssl=exporter.secure, server_hostname="localhost"
        )
        if "AES_128" in more:
            assert writer.get_extra_info("cipher")[0] == "ECDHE-ECDSA-AES128-GCM-SHA256"
        writer.close()
        assert (await exporter.ask()).status == 200
        del reader


async def test_a_certificate_and_key_within_the_file(file: Path, authority: Authority) -> None:
    """Certificate and key may be in the file itself, and are not written to a disk."""
    cert, key = (
        indent(file.with_name(f"server.{kind}").read_text("ascii"), "    ") for kind in ("pem", "key")
    )
    text = f"tls_server_config:\n  cert: |\n{cert}  key: |\n{key}"
    async with serve_secured(file, text, trusting(authority.pair)) as exporter:
        assert (await exporter.ask()).status == 200


@pytest.mark.parametrize(("policy", "without"), [("RequireAndVerifyClientCert", False),
                                                 ("VerifyClientCertIfGiven", True)])  # fmt: skip
async def test_client_certificates(file: Path, authority: Authority, policy: str, without: bool) -> None:
    """A client's certificate must be of the named authority; without one only the lenient policy allows."""
    own, other = authority.sign("client"), Authority(file.parent, "stranger").sign("other")
    text = tls(f"  client_ca_file: ca.pem\n  client_auth_type: {policy}\n")
    async with serve_secured(file, text, trusting(authority.pair, own)) as exporter:
        assert (await exporter.ask()).status == 200
        none = SecuredExporter(exporter.port, trusting(authority.pair))
        if without:
            assert (await none.ask()).status == 200
        else:
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await none.ask()
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await SecuredExporter(exporter.port, trusting(authority.pair, other)).ask()


@pytest.mark.parametrize(("allowed", "status"), [
    ("prometheus.test", 200), ("10.0.0.1", 200), ("'2001:db8::1'", 200), ("ops@example.org", 200),
    ("spiffe://a/b", 200), ("other.test", 403), ("PROMETHEUS", 403),
])  # fmt: skip
async def test_only_named_clients(file: Path, authority: Authority, allowed: str, status: int) -> None:
    """A certificate of the right authority is accepted only with one of the names in the file."""
    sans = "DNS:prometheus.test,IP:10.0.0.1,IP:2001:db8::1,email:ops@example.org,URI:spiffe://a/b"
    own = authority.sign("client", sans)
    text = tls(f"  client_allowed_sans: [{allowed}]\n", clients="ca.pem")
    async with serve_secured(file, text, trusting(authority.pair, own)) as exporter:
        assert (await exporter.ask()).status == status


@pytest.mark.parametrize(("change", "said"), [
    ("rm server.pem", "cannot read cert_file"), ("rm server.key", "cannot read key_file"),
    ("echo rubbish > server.pem", "are not a certificate with its key"),
    ("cp ca.key server.key", "are not a certificate with its key"),
    ("openssl ec -aes256 -passout pass:x -in server.key -out locked.key && mv locked.key server.key",
     "are not a certificate with its key, in PEM, unencrypted"),
    ("rm ca.pem", "cannot read client_ca_file"), ("echo rubbish > ca.pem", "holds no certificate in PEM"),
])  # fmt: skip
async def test_bad_files_keep_it_from_starting(file: Path, tmp_path: Path, change: str, said: str) -> None:
    """For a missing or wrong certificate, key or authority there is one line, and the port is not opened."""
    Authority(tmp_path).sign("server")
    assert os.system(f"cd {tmp_path} && ({change}) 2>/dev/null") == 0  # noqa: ASYNC221, S605 a table of commands
    with pytest.raises(StartupError) as error:
        async with serve_secured(file, tls(clients="ca.pem")):
            pytest.fail("it started with a bad file")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


async def test_a_renewed_certificate_is_served(file: Path, tmp_path: Path) -> None:
    """A new certificate is used for new connections without a restart; a broken one is not, and is logged."""
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    first, second = old.sign("server"), new.sign("renewed")
    async with serve_secured(file, tls(), trusting(old.pair)) as exporter:
        renewed = SecuredExporter(exporter.port, trusting(new.pair))
        assert loaded(await exporter.ask()) == 1
        first.key.write_bytes(second.key.read_bytes())  # half of a renewal: they do not match
        await until_answered(exporter.ask, lambda answer: loaded(answer) == 0)
        first.certificate.write_bytes(second.certificate.read_bytes())

        async def taken() -> bool:
            try:
                return (await renewed.ask()).status == 200
            except aiohttp.ClientError:
                return False

        await until(taken)
        await until_answered(renewed.ask, lambda answer: loaded(answer) == 1)


async def test_other_users_end_the_streams(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open stream ends when the permissions change, and with no other change."""
    monkeypatch.setattr(page_stream, "HEARTBEAT", 0.05)
    monkeypatch.setattr(page_stream, "PERIOD", 0.01)
    async with serve_secured(file, USERS) as exporter, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{exporter.port}/api/v1/events"
        async with session.get(url, headers=header(ALICE)) as stream:
            assert stream.status == 200
            assert await stream.content.readuntil(b"\n\n")
            write_config(file, f"{USERS}http_server_config:\n  headers: {{X-Frame-Options: deny}}\n")
            ask = partial(exporter.ask, auth=ALICE)
            await until_answered(ask, lambda answer: "X-Frame-Options" in answer.headers)
            for _ in range(5):
                assert (await stream.content.readuntil(b"\n\n")).endswith(b"\n\n"), "it goes on"
            write_config(file, f"basic_auth_users:\n  bob: {HASH}\n")
            await stream.content.read()  # to its end
        async with session.get(url, headers=header(ALICE)) as stream:
            assert stream.status == 401
        async with session.get(url, headers=header(("bob", "wonder"))) as stream:
            assert await stream.content.readuntil(b"\n\n")


@pytest.mark.parametrize("text", ["", "basic_auth_users: {}", "nonsense: 1", "rate_limit: {interval: 0}"])
async def test_no_change_opens_the_door(file: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """After a reload of an empty or wrong file the old rules stay in force."""
    with caplog.at_level(logging.ERROR, "vramledger"):
        async with serve_secured(file, USERS) as exporter:
            write_config(file, text)
            await until(lambda: "Kept the old web configuration" in caplog.text)
            assert (await exporter.ask()).status == 401
            assert loaded(await exporter.ask(auth=ALICE)) == 0


async def test_without_a_file_nothing_is_said_of_one() -> None:
    """Without a web configuration there is no series about its state, and all refusals are 0."""
    async with serve(LOOPBACK, Shown()) as (address,):
        page = (await SecuredExporter(address.port).ask()).text
        assert "web_config" not in page
        assert len(re.findall(r"^vramledger_web_refused_requests_total\{.*\} 0", page, re.MULTILINE)) == 6


async def test_what_is_readable_by_all_is_told(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Hashes that every user of the host can read, and passwords without TLS, cause a warning each."""
    write_config(file, USERS, 0o644)
    with caplog.at_level(logging.WARNING, "vramledger"):
        async with serve(replace(LOOPBACK, web_config=file), Shown()):
            pass
    assert "Every user of this host can read the password hashes" in caplog.text
    assert "Passwords cross the network in the clear" in caplog.text
