"""Guess passwords at a steady pace.

``python -m tests.lab.bench.guesser PORT RATE SECONDS ADDRESSES kept|fresh``

Prints how many guesses got which status. From so many addresses of loopback, on connections that are kept or
on a fresh one for each guess; sixty at once, so that one that waits for its answer does not slow the others.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

_AT_ONCE = 60


class _Guesser(threading.Thread):
    def __init__(self, port: int, order: tuple[int, int, int], turns: Iterator[int], *, keep: bool) -> None:
        super().__init__()
        self.statuses: Counter[str] = Counter()
        self._port = port
        self._rate, self._seconds, self._addresses = order
        self._turns = turns  # itertools.count gives each number to one thread
        self._keep = keep
        self._kept: dict[str, socket.socket] = {}

    def run(self) -> None:
        begun = time.monotonic()
        for number in self._turns:
            if number >= self._rate * self._seconds or time.monotonic() > begun + self._seconds:
                return
            time.sleep(max(0.0, begun + number / self._rate - time.monotonic()))
            try:
                self._guess(number)
            except OSError as error:
                self.statuses[type(error).__name__] += 1

    def _guess(self, number: int) -> None:
        address = f"127.0.1.{1 + number % self._addresses}"
        login = base64.b64encode(f"alice:{number}".encode()).decode()
        connection = self._kept.pop(address, None)
        if connection is None:
            connection = socket.create_connection(("127.0.0.1", self._port), 10, (address, 0))
            # Reset at its end: of an address's 28,000 ports none waits a minute then. When they had run out,
            # the kernel's search for one slowed the scrapes beside it, to a p90 of 108 ms.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(
            f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic {login}\r\n\r\n".encode()
        )
        answer = connection.recv(4096)
        self.statuses[answer[9:12].decode() or "closed"] += 1
        if self._keep and b"\r\nConnection: close\r\n" not in answer:
            self._kept[address] = connection
        else:
            with contextlib.suppress(OSError):
                connection.close()


def main() -> None:
    """Guess, and report the results."""
    port, rate, seconds, addresses = map(int, sys.argv[1:5])
    order, keep = (rate, seconds, addresses), sys.argv[5] == "kept"
    turns = itertools.count()
    guessers = [_Guesser(port, order, turns, keep=keep) for _ in range(_AT_ONCE)]
    for guesser in guessers:
        guesser.start()
    total: Counter[str] = Counter()
    for guesser in guessers:
        guesser.join()
        total += guesser.statuses
    print(json.dumps({"seconds": seconds, "statuses": total}))


if __name__ == "__main__":
    main()
