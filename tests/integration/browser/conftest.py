"""One browser for all tests of the page, and one exporter's page for each."""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import resources
from typing import Any

import pytest

from tests.support.builders import Shown
from tests.support.chromium import Tab, chromium, tab
from tests.support.requirements import require_tool
from tests.support.serving import LOOPBACK, served


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """Run a browser, or skip loudly where there is none."""
    with chromium(require_tool("chromium")) as address:
        yield address


async def violations(page: Tab) -> Any:  # noqa: ANN401 JSON
    """Return the accessibility rules of axe-core that a page breaks, with the elements that do."""
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    await page.run(f"{axe}; 0")
    told = "[v.id, v.nodes.map(n => n.html + n.failureSummary)]"
    return await page.run(f"axe.run().then(r => r.violations.map(v => {told}))")


Looking = Callable[[Shown], AbstractAsyncContextManager[Tab]]


@pytest.fixture
def look(browser: str) -> Looking:
    """Return a function that opens what an exporter shows, with its holders, and without complaints."""

    @asynccontextmanager
    async def looking(shown: Shown) -> AsyncIterator[Tab]:
        async with served(shown, LOOPBACK) as client, tab(browser) as page:
            await page.size(1280, 900)
            await page.go(f"http://127.0.0.1:{client.port}/")
            if any(device.holdings for device in shown.snapshot.devices):
                await page.until("document.querySelector('#rows tr') !== null")
            yield page
            assert page.complaints == []

    return looking
