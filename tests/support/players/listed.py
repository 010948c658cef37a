"""Players as holders on the stand-in driver."""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from tests.support.standin.library import GIB, StandIn, Unit


class Listed(Protocol):
    @property
    def pid(self) -> int: ...

    def wait(self) -> object: ...

    def end(self) -> object: ...


@contextmanager
def listed_while_alive(device: StandIn | Unit, *players: Listed, memory: int | None = GIB) -> Iterator[None]:
    """List players on a device, and each until it has ended, as a driver does; they end behind it."""
    on = device.device(0) if isinstance(device, StandIn) else device
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
            on.set_processes([(pid, memory) for pid in alive])

    on.set_processes([(pid, memory) for pid in alive])
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
