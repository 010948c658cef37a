"""A change of the web configuration is never missed, and never lets in who was kept out."""

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest

from tests.support.certificates import Authority
from tests.support.secured import (
    ALICE,
    HASH,
    USERS,
    SecuredExporter,
    serve_secured,
    tls,
    trusting,
    write_config,
)
from tests.support.serving import HEALTH, until, until_answered
from vramledger.web.access import config_file
from vramledger.web.access.tls import AccessSettings

BOB = ("bob", "wonder")
BOTH = f"{USERS}  bob: {HASH}\n"
CLIENTS = tls(clients="clients.pem")


@pytest.mark.parametrize("times", [1, 3])
async def test_a_change_within_a_reload(file: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A user who is removed while the file is being read is out soon, however often that happens."""
    read, texts = config_file.read_settings, [USERS, *[f"{BOTH}# {number}\n" for number in range(times)]]

    def read_and_change(path: Path) -> AccessSettings:
        settings = read(path)
        if len(settings.users) == 2 and texts:
            write_config(path, texts.pop())
        return settings

    async with serve_secured(file, USERS) as exporter:
        monkeypatch.setattr(config_file, "read_settings", read_and_change)
        write_config(file, BOTH)
        await until(lambda: not texts)
        await until_answered(lambda: exporter.ask(auth=BOB), lambda answer: answer.status in (401, 429))
        assert (await exporter.ask(auth=ALICE)).status == 200


async def test_what_was_missing_is_found_when_it_comes(file: Path, authority: Authority) -> None:
    """A file that names a certificate which is not there yet is used as soon as it is there."""
    new = authority.sign("new").certificate
    late = new.rename(file.with_name("late"))
    async with serve_secured(file, tls(), trusting(authority.pair)) as exporter:
        write_config(file, tls(server="new") + USERS)
        await until_answered(exporter.ask, lambda answer: "last_reload_successful 0" in answer.text)
        late.rename(new)
        await until_answered(exporter.ask, 401)


NAMED = f"{CLIENTS}  client_allowed_sans: [other.test]\n"
OTHERS = {"authority": CLIENTS, "file": tls(clients="other.pem"), "names": NAMED}


# asyncio of Python 3.10 never closes its own transport of a handshake that failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("changed", OTHERS)
async def test_a_connection_ends_with_its_right(file: Path, authority: Authority, changed: str) -> None:
    """Who has connected with a certificate that is no longer accepted is disconnected, and stays out."""
    clients, other = (Authority(file.parent, name) for name in ("clients", "other"))
    own, new = clients.sign("own"), other.sign("new")
    async with serve_secured(file, CLIENTS, trusting(authority.pair, own)) as exporter:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", exporter.port, ssl=exporter.secure, server_hostname="localhost"
        )
        writer.write(HEALTH)
        await reader.readuntil(b"healthy.\n")
        if changed == "authority":
            clients.pair.certificate.write_bytes(other.pair.certificate.read_bytes())
        else:
            write_config(file, OTHERS[changed])
        assert await reader.read() == b""
        writer.close()
        if changed == "names":
            assert (await exporter.ask()).status == 403
            return
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await exporter.ask()
        assert (await SecuredExporter(exporter.port, trusting(authority.pair, new)).ask()).status == 200


LAST_LINES = ["  client_allowed_sans: [own.test]\n", "rate_limit: {interval: 1h, burst: 1000}\n"]


@pytest.mark.parametrize("last", LAST_LINES)
async def test_what_was_closed_stays_closed(
    file: Path, authority: Authority, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that no longer has its last lines removes no protection: it may be half-written."""
    clients = Authority(file.parent, "clients")
    own, stranger = clients.sign("own", "DNS:own.test"), clients.sign("stranger", "DNS:stranger.test")
    with caplog.at_level(logging.ERROR, "vramledger"):
        async with serve_secured(file, CLIENTS + last, trusting(authority.pair, own)) as exporter:
            write_config(file, CLIENTS)
            await until(lambda: "Kept the old web configuration" in caplog.text)
            assert (await exporter.ask()).status == 200
            if "own.test" in last:
                other = SecuredExporter(exporter.port, trusting(authority.pair, stranger))
                assert (await other.ask()).status == 403
