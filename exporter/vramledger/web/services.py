"""Hold what the web pages need of the rest of the program, and its keys in the application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from aiohttp import web

from vramledger.config import Config
from vramledger.metrics.families import Collected
from vramledger.model.snapshot import Snapshot
from vramledger.views.timeline import Timeline

AskPast = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], bytes]]]
"""Return the head and content of the storage's answer to a question."""


class AppServices(Protocol):
    """The source of the newest snapshot; only the event loop writes and reads it."""

    @property
    def snapshot(self) -> Snapshot:
        """The newest snapshot; an empty one before the first sample."""

    @property
    def ready(self) -> bool:
        """Whether the first attempt at a sample has finished, with success or not."""

    @property
    def sampler_pid(self) -> int | None:
        """The sampler's process id, None while there is none."""

    async def wait_for_newer(self, serial: int) -> Snapshot:
        """Wait until a snapshot newer than ``serial`` is published, and return it."""


@dataclass
class PageState:
    """What the pages share with the control socket."""

    timeline: Timeline = field(default_factory=Timeline)  # what the page remembers
    past: AskPast | None = None  # asks the storage; None where nothing is stored
    collect: Callable[[], Collected] = list  # gives the families of the storage
    check_open: Callable[[], bool] = lambda: False  # tells whether everybody who reaches the page may read it

    def open_to_all(self) -> bool:
        """Tell whether everybody who reaches the page may read it; nobody before it is served."""
        return self.check_open()


CONFIG = web.AppKey("config", Config)
SERVICES: web.AppKey[AppServices] = web.AppKey("services", AppServices)
