"""A server over TLS that lists pods for clients with the token, as a kubelet and an API server do."""

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from tests.support.certificates import Pair
from tests.support.kubernetes_api import TOKEN


def listed_pod(
    name: str, labels: Mapping[str, Any] | None = None, *, made: str = "2026-01-01T00:00:00Z"
) -> dict[str, Any]:
    """Return a pod as a kubelet lists it: with its containers, and their variables."""
    variables = [{"name": "PASSWORD", "value": "hunter2"}, {"name": "team", "value": "not the label"}]
    return {
        "metadata": {"name": name, "namespace": "ml", "creationTimestamp": made, "labels": labels},
        "spec": {"containers": [{"name": "main", "env": variables}], "nodeSelector": {"team": "none"}},
        "status": {"phase": "Running"},
    }


def pod_list(*pods: Any) -> bytes:  # noqa: ANN401 also what is not a pod
    """Return a list of pods as both servers write it."""
    return json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": pods}).encode()


@dataclass
class PodServer:
    """What is answered, and what was asked: path and Accept of each request, also of refused ones."""

    body: bytes = b""
    status: int = 200  # who has no token gets 401
    port: int = 0
    asked: list[tuple[str, str]] = field(default_factory=list)
    begin: bytes = b""  # is sent before the answer
    piece: bytes = b""  # is sent again and again before it, until the client closes; then there is none


class _Server(ThreadingTCPServer):
    """A server that says nothing about a client that does not trust it and hangs up."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing."""


def _handler(server: PodServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append((self.path, self.headers["Accept"]))
            self.wfile.write(server.begin)
            try:
                while server.piece:
                    self.wfile.write(server.piece)
                    time.sleep(0.02)
            except OSError:
                server.piece = b""
            known = self.headers["Authorization"] == f"Bearer {TOKEN}"
            body = server.body if known else b"Unauthorized"
            self.send_response(server.status if known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        log_message: Callable[..., None] = lambda *_: None

    return Handler


@contextmanager
def serve_pods(pair: Pair, *pods: Any) -> Iterator[PodServer]:  # noqa: ANN401 also what is not a pod
    """Serve a list of pods on a port of loopback."""
    found = PodServer(pod_list(*pods))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    with _Server(("127.0.0.1", 0), _handler(found)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        found.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield found
        finally:
            server.shutdown()
            thread.join()
