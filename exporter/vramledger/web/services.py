"""Hold what the web pages need of the rest of the program, and its keys in the application."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from vramledger.config import Config
from vramledger.model.snapshot import Snapshot


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


CONFIG = web.AppKey("config", Config)
SERVICES: web.AppKey[AppServices] = web.AppKey("services", AppServices)
