"""Ask a server of Kubernetes, over TLS and with the token of this pod."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vramledger.errors import VramledgerError

if TYPE_CHECKING:
    import ssl
    from http.client import HTTPResponse

TIMEOUT = 5.0
"""Seconds for which a connection may be silent."""

LONGEST = 10.0
"""Seconds after which the rest of an answer is not waited for."""

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

    def request(
        self, method: str, path: str, headers: Mapping[str, str] = {}, body: bytes | None = None
    ) -> bytes:
        """Return the body of an answer. Raises ClusterError if there is none, or it is a refusal.

        Token and certificate are read each time, as the kubelet renews both; only who has the cluster's
        certificate gets the token.
        """
        # With ssl it takes 5 MiB of the sampler (Python 3.11), which asks only with --pods.labels.
        from http.client import HTTPException, HTTPSConnection  # noqa: PLC0415

        try:
            token = _read_token(self.credentials / "token")
            trust = _trust(self.credentials / "ca.crt")
            deadline = time.monotonic() + LONGEST
            connection = HTTPSConnection(self.host, self.port, timeout=TIMEOUT, context=trust)
            try:
                connection.request(method, path, body, {**headers, "Authorization": f"Bearer {token}"})
                answer = connection.getresponse()
                content = _read(answer, deadline)
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            text = " ".join(str(error).split())[:_MAX_ERROR_CHARS]
            raise ClusterError(text or type(error).__name__) from error
        if answer.status != _OK:
            text = " ".join(content[: 4 * _MAX_ERROR_CHARS].decode(errors="replace").split())
            raise ClusterError(f"{answer.status} {text[:_MAX_ERROR_CHARS]}".strip(), answer.status)
        if len(content) > MAX_BYTES:
            raise ClusterError(f"the answer is longer than {MAX_BYTES // 2**20} MiB")
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


def _read(answer: HTTPResponse, deadline: float) -> bytes:
    """Return the body of an answer, or some bytes more than one may have."""
    content = bytearray()
    while len(content) <= MAX_BYTES and (piece := answer.read1(65536)):
        content += piece
        if time.monotonic() > deadline:
            raise TimeoutError("the answer takes too long")
    return bytes(content)


def _trust(authority: Path) -> ssl.SSLContext:
    import ssl  # noqa: PLC0415 see above

    context = ssl.create_default_context(cafile=authority)
    # Since Python 3.13 an authority must have identifiers of keys, which those of some clusters do not have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context
