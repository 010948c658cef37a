"""One browser for all tests of the page, and one exporter's page for each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.support.builders import Shown
from tests.support.chromium import Tab, chromium, tab
from tests.support.requirements import require_tool
from tests.support.serving import LOOPBACK, served
from vramledger.model.snapshot import Snapshot


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """Run a browser, or skip loudly where there is none."""
    with chromium(require_tool("chromium")) as address:
        yield address


@dataclass(frozen=True)
class Look:
    """A tab that shows the page of an exporter in this process.

    Attributes:
        tab: the tab.
        shown: what the exporter shows; a test puts the next snapshot there.
        url: where the page is.
    """

    tab: Tab
    shown: Shown
    url: str

    def publish(self, snapshot: Snapshot) -> None:
        """Show another snapshot, as the sample after the last one."""
        self.shown.snapshot = snapshot


Steps = Callable[[Look], Awaitable[None]]
Looking = Callable[[Shown, Steps], None]


@pytest.fixture
def look(browser: str) -> Looking:
    """Return a function that opens a snapshot's page and runs steps on it, without complaints."""

    def looking(shown: Shown, steps: Steps) -> None:
        async def test() -> None:
            async with served(shown, LOOPBACK) as client, tab(browser) as page:
                await page.size(1280, 900)
                url = f"http://127.0.0.1:{client.port}/"
                await page.go(url)
                await steps(Look(page, shown, url))
                assert page.complaints == []

        asyncio.run(asyncio.wait_for(test(), 60))

    return looking
