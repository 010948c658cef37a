"""A change of the web configuration is never missed, and never lets in who was kept out."""

import asyncio
import logging
from collections.abc import Callable
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


async def test_what_was_missing_is_found_when_it_comes(file: Path, tmp_path: Path) -> None:
    """A file that names a certificate which is not there yet is used as soon as it is there."""
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    for each in (pair.certificate, pair.key):
        (tmp_path / f"new{each.suffix}").write_bytes(each.read_bytes())
    late = (tmp_path / "new.pem").rename(tmp_path / "late")
    async with serve_secured(file, tls(), trusting(authority.pair)) as exporter:
        write_config(file, tls(server="new") + USERS)
        await until_answered(exporter.ask, lambda answer: "last_reload_successful 0" in answer.text)
        late.rename(tmp_path / "new.pem")
        await until_answered(exporter.ask, 401)


Change = Callable[[Path, Path], None]


def _other_authority(home: Path, _: Path) -> None:
    (home / "clients.pem").write_bytes((home / "other.pem").read_bytes())


def _other_file(_: Path, file: Path) -> None:
    write_config(file, CLIENTS.replace("clients.pem", "other.pem"))


def _other_names(_: Path, file: Path) -> None:
    write_config(file, f"{CLIENTS}  client_allowed_sans: [other.test]\n")


# asyncio of Python 3.10 never closes its own transport of a handshake that failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("change", [_other_authority, _other_file, _other_names])
async def test_a_connection_ends_with_its_right(file: Path, tmp_path: Path, change: Change) -> None:
    """Who has connected with a certificate that is no longer accepted is disconnected, and stays out."""
    server, clients, other = (Authority(tmp_path, name) for name in ("ca", "clients", "other"))
    server.sign("server")
    own, new = clients.sign("own"), other.sign("new")
    async with serve_secured(file, CLIENTS, trusting(server.pair, own)) as exporter:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", exporter.port, ssl=exporter.secure, server_hostname="localhost"
        )
        writer.write(HEALTH)
        await reader.readuntil(b"healthy.\n")
        change(tmp_path, file)
        assert await reader.read() == b""
        writer.close()
        if change is _other_names:
            assert (await exporter.ask()).status == 403
            return
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await exporter.ask()
        assert (await SecuredExporter(exporter.port, trusting(server.pair, new)).ask()).status == 200


@pytest.mark.parametrize(("before", "after"), [
    (f"{CLIENTS}  client_allowed_sans: [own.test]\n", CLIENTS),
    (f"{CLIENTS}rate_limit: {{interval: 1h, burst: 1000}}\n", CLIENTS),
])  # fmt: skip
async def test_what_was_closed_stays_closed(
    file: Path, tmp_path: Path, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A file that no longer has its last lines removes no protection: it may be half-written."""
    server, clients = Authority(tmp_path), Authority(tmp_path, "clients")
    server.sign("server")
    own, stranger = clients.sign("own", "DNS:own.test"), clients.sign("stranger", "DNS:stranger.test")
    with caplog.at_level(logging.ERROR, "vramledger"):
        async with serve_secured(file, before, trusting(server.pair, own)) as exporter:
            write_config(file, after)
            await until(lambda: "Kept the old web configuration" in caplog.text)
            assert (await exporter.ask()).status == 200
            if "own.test" in before:
                other = SecuredExporter(exporter.port, trusting(server.pair, stranger))
                assert (await other.ask()).status == 403
