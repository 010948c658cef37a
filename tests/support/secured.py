"""An exporter with a web configuration file, for tests of access."""

import base64
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import bcrypt
from msgspec.structs import replace

from tests.support.builders import Shown, crowd
from tests.support.certificates import Pair
from tests.support.serving import LOOPBACK, Answer
from vramledger.web.app import serve

HASH = bcrypt.hashpw(b"wonder", bcrypt.gensalt(4)).decode()
Login = tuple[str, str]
ALICE = ("alice", "wonder")
USERS = f"basic_auth_users:\n  alice: {HASH}\n"


def tls(more: str = "", server: str = "server", *, clients: str = "") -> str:
    """Write settings of TLS with a certificate, and with one of this authority that each client must have."""
    if clients:
        more = f"  client_ca_file: {clients}\n  client_auth_type: RequireAndVerifyClientCert\n{more}"
    return f"tls_server_config:\n  cert_file: {server}.pem\n  key_file: {server}.key\n{more}"


def header(login: Login | None) -> dict[str, str]:
    """Write a login as the header of a request."""
    if login is None:
        return {}
    return {"Authorization": f"Basic {base64.b64encode(':'.join(login).encode()).decode()}"}


@dataclass(frozen=True)
class SecuredExporter:
    """Where to send requests to an exporter."""

    port: int
    secure: ssl.SSLContext | None = None

    async def ask(self, path: str = "/metrics", auth: Login | None = None, method: str = "GET") -> Answer:
        url = f"{'https' if self.secure else 'http'}://127.0.0.1:{self.port}{path}"
        async with (
            aiohttp.ClientSession(headers=header(auth)) as session,
            session.request(method, url, ssl=self.secure or True) as answer,
        ):
            return Answer(answer.status, answer.headers, await answer.read())


def trusting(authority: Pair, own: Pair | None = None) -> ssl.SSLContext:
    """Return a client's TLS settings: it trusts an authority, and shows its own certificate."""
    context = ssl.create_default_context(cafile=str(authority.certificate))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    return context


def write_config(file: Path, text: str, mode: int = 0o600) -> None:
    """Write a web configuration file that, with this mode, no other user can read."""
    file.write_text(text, encoding="utf-8")
    file.chmod(mode)


@asynccontextmanager
async def serve_secured(
    file: Path, text: str, secure: ssl.SSLContext | None = None
) -> AsyncIterator[SecuredExporter]:
    """Serve with a web configuration file with this text."""
    write_config(file, text)
    async with serve(replace(LOOPBACK, web_config=file), Shown(crowd(1, 1))) as (address,):
        yield SecuredExporter(address.port, secure)
