"""Tell systemd that the exporter runs, so that a frozen one is restarted (sd_notify(3), WatchdogSec=)."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from vramledger.web.cancellation import background_task

_MICROSECONDS = 1e6


@asynccontextmanager
async def notify_service_manager() -> AsyncIterator[None]:
    """Report that we are ready, and then twice per watchdog period that we run, until the block ends.

    The reports are sent from the event loop, which answers scrapes: if it hangs, they stop. Nothing is sent
    if no service manager has asked for it.
    """
    address, pid = os.environ.pop("NOTIFY_SOCKET", ""), os.environ.pop("WATCHDOG_PID", str(os.getpid()))
    limit = os.environ.pop("WATCHDOG_USEC", "")
    if not address:
        yield
        return
    _send(address, "READY=1")
    if pid != str(os.getpid()) or not limit.isdigit() or not int(limit):
        yield
        return
    async with background_task(_keep_alive(address, int(limit) / _MICROSECONDS / 2)):
        yield


async def _keep_alive(address: str, interval: float) -> None:
    while True:
        _send(address, "WATCHDOG=1")
        await asyncio.sleep(interval)


def _send(address: str, state: str) -> None:
    """Send a state; a service manager that does not take it now gets the next one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to, suppress(OSError):
        to.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
