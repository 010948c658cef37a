"""Tell systemd that the exporter runs, so that a frozen one is restarted (sd_notify(3), WatchdogSec=)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from vramledger.web.cancellation import background_task

_MICROSECONDS = 1e6

CLASS_INTERVAL = 5.0
"""Seconds between two looks for a driver that was not loaded when we started."""


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


def is_managed() -> bool:
    """Tell whether a service manager waits for our reports; it starts us again when we end."""
    return bool(os.environ.get("NOTIFY_SOCKET"))


async def wait_for_forbidden_driver(
    has_class: Callable[[], bool], open_device: Callable[[], int], interval: float = CLASS_INTERVAL
) -> None:
    """Return when a driver has come whose devices are forbidden to us; never, if it was there before.

    systemd translates ``DeviceAllow=char-nvidia`` into numbers when it starts a unit. A class that does not
    exist then stays forbidden (seen with systemd 252: EPERM), until the unit is started again. Its file may
    come later than the class.
    """
    found = 0 if has_class() else errno.ENODEV
    while found != errno.EPERM:
        if found == 0:
            await asyncio.Event().wait()
        await asyncio.sleep(interval)
        found = open_device() if has_class() else errno.ENODEV


async def _keep_alive(address: str, interval: float) -> None:
    while True:
        _send(address, "WATCHDOG=1")
        await asyncio.sleep(interval)


def _send(address: str, state: str) -> None:
    """Send a state; a service manager that does not take it now gets the next one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as to, suppress(OSError):
        to.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)
