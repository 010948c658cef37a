"""Ask a server of Kubernetes, over TLS and with the token of this pod."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from vramledger.errors import VramledgerError
from vramledger.exchange import ask_http, by

LONGEST = 10.0
"""Seconds for a whole request."""

MAX_BYTES = 32 * 2**20
"""The longest answer that is read: a kubelet with 250 pods, each of 100 KiB, has less."""

_MAX_ERROR_CHARS = 300
_OK = 200


class ClusterError(VramledgerError):
    """The server did not do it; the message says why."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class ClusterServer(NamedTuple):
    """The API server or a kubelet, and the folder of our token and of the cluster's certificate."""

    host: str
    port: int
    credentials: Path

    def request(self, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes = b"") -> bytes:
        """Return the body of an answer. Raises ClusterError if there is none, or it is a refusal.

        Token and certificate are read each time, as the kubelet renews both; only who has the cluster's
        certificate gets the token.
        """
        import ssl  # noqa: PLC0415 it takes 5 MiB of the sampler, which asks only with --pods.labels

        until = time.monotonic() + LONGEST
        try:
            told = {
                **headers,
                "Host": f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}",
                "Authorization": f"Bearer {_read_token(self.credentials / 'token')}",
                "Accept-Encoding": "identity",
                "Content-Length": len(body),
                "Connection": "close",
            }
            head = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            request = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("ascii") + body
            trust = ssl.create_default_context(cafile=self.credentials / "ca.crt")
            # Since Python 3.13 an authority must have identifiers of keys, which some clusters' do not have.
            trust.verify_flags &= ~ssl.VERIFY_X509_STRICT
            with (
                socket.create_connection((self.host, self.port), LONGEST) as plain,
                trust.wrap_socket(by(until, plain), server_hostname=self.host) as connection,
            ):
                status, content = ask_http(connection, request, until, MAX_BYTES)
        except (OSError, ValueError) as error:
            text = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
            raise ClusterError(text or type(error).__name__) from error
        if status != _OK:
            text = " ".join(content[: 4 * _MAX_ERROR_CHARS].decode(errors="replace").split())
            raise ClusterError(f"{status} {text[:_MAX_ERROR_CHARS]}".strip(), status)
        return content


def find_api_server(environ: Mapping[str, str], credentials: Path) -> ClusterServer | None:
    """Return the API server that the kubelet names in the environment of a pod; elsewhere there is none."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    return ClusterServer(host, int(port), credentials) if host and port.isascii() and port.isdigit() else None


def _read_token(path: Path) -> str:
    """Return the token; one of several lines would be an error that has it in its words."""
    token = path.read_text(encoding="ascii").strip()
    if not token.isprintable():
        raise ValueError("the token is not one line")
    return token
