"""A mail server for one test: it accepts what a real client sends, and keeps it."""

import email
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.message import EmailMessage
from email.policy import default


class _Session(socketserver.StreamRequestHandler):
    """One connection, by as much of RFC 5321 as clients need."""

    def handle(self) -> None:
        self.wfile.write(b"220 stand-in\r\n")
        for line in self.rfile:
            word = line[:4].upper().strip()
            if word == b"DATA":
                self.wfile.write(b"354 go on\r\n")
                lines = list(iter(self.rfile.readline, b".\r\n"))
                text = b"".join(each.removeprefix(b".") for each in lines)
                self.server.got.append(email.message_from_bytes(text, policy=default))  # type: ignore[attr-defined]
            self.wfile.write(b"221 bye\r\n" if word == b"QUIT" else b"250 ok\r\n")
            if word == b"QUIT":
                return


@contextmanager
def mailbox() -> Iterator[tuple[int, list[EmailMessage]]]:
    """Accept mail; yield the port, and what has arrived."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Session) as server:
        server.got = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, name="mailbox", daemon=True).start()
        try:
            yield server.server_address[1], server.got  # type: ignore[attr-defined]
        finally:
            server.shutdown()
