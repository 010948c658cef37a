"""Players as holders on the stand-in driver."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from tests.support.standin.library import GIB, StandIn


class Listed(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> object: ...

    def end(self) -> object: ...


@contextmanager
def listed_while_alive(standin: StandIn, *players: Listed) -> Iterator[None]:
    """List players with 1 GiB each, and each until it has ended, as a driver does; they end behind it."""
    alive = [each.pid for each in players]
    lock = threading.Lock()

    def follow(player: Listed) -> None:
        ended = False
        while not ended:  # a test on a slow machine takes longer than one wait
            with suppress(subprocess.TimeoutExpired):
                player.wait()
                ended = True
        with lock:
            alive.remove(player.pid)
            standin.device(0).set_processes([(pid, GIB) for pid in alive])

    standin.device(0).set_processes([(pid, GIB) for pid in alive])
    followers = [threading.Thread(target=follow, args=(each,)) for each in players]
    for follower in followers:
        follower.start()
    try:
        yield
    finally:
        for each in players:
            each.end()
        for follower in followers:
            follower.join()
