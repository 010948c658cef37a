#!/opt/vramledger/bin/python -I
"""Say by the exit status whether the exporter answers: 0 if it does, even if it refuses the request.

One that is frozen is not healthy, although the kernel accepts connections for it. A host without a driver is
healthy: the exporter then serves ``vramledger_up 0``, and a restart of the container would not fix it. With
TLS it answers a plain request with an alert, or closes the connection; a frozen one does neither.
``VRAMLEDGER_URL`` is its address, if it is not the default.
"""

import os
import socket
import sys
from urllib.parse import urlsplit

TIMEOUT = 4.0
ERRORS = (b" 404", b" 500")
"""The answers of something else on this port, and of a defect."""

url = os.environ.get("VRAMLEDGER_URL", "http://127.0.0.1:10839").rstrip("/") + "/-/healthy"
address = urlsplit(url)
try:
    connection = socket.create_connection((address.hostname or "", address.port or 80), timeout=TIMEOUT)
except (OSError, ValueError) as error:
    sys.exit(f"{url}: {error}")
try:
    connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    answer = connection.recv(64)
except TimeoutError:
    sys.exit(f"{url}: no answer within {TIMEOUT:.0f} s")
except ConnectionError:  # it does not speak HTTP without TLS, and has said so
    answer = b""
if answer.startswith(b"HTTP/1.1") and answer[8:12] in ERRORS:
    sys.exit(f"{url}: {answer.splitlines()[0].decode(errors='replace')}")
