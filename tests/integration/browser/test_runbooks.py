"""The runbooks in a real browser."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from tests.integration.browser.conftest import Look, Looking
from tests.support.builders import Shown, crowd

CUT_OFF = (
    "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth"
    " || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible')"
    ".map(e => e.outerHTML)"
)
"""Elements that are wider than the window, or have more content than they show."""


@pytest.mark.repeats(kept=5)  # one in each way, and the page that lists them
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["GpuMemoryPreallocatedShared", "", "GpuMemoryLeakSuspected"])
def test_a_runbook_can_be_read(look: Looking, name: str, width: int, theme: str) -> None:
    """Nothing is cut off and axe-core finds no violation: in both themes, on a screen and on a phone."""
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")

    async def steps(view: Look) -> None:
        await view.tab.size(width, 900, mobile=width < 600)
        await view.tab.prefer(prefers_color_scheme=theme)
        await view.tab.go(f"{view.url}runbooks/{name}")
        assert await view.tab.run(CUT_OFF) == []
        assert await view.tab.run("document.documentElement.scrollWidth") == width
        ground = await view.tab.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(13, 17, 23)" if theme == "dark" else "rgb(244, 246, 248)")
        await view.tab.run(f"{axe}; 0")
        found = await view.tab.run(
            "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))"
        )
        assert found == []

    look(Shown(crowd(1, 1)), steps)


async def follow(view: Look, link: str) -> None:
    """Follow a link; its page is gone afterwards, and cannot report the click."""
    await view.tab.run(f"setTimeout(() => document.querySelector({json.dumps(link)}).click())")


def test_from_the_page_to_a_runbook_and_back(look: Looking) -> None:
    """The page links to the list, the list to each runbook, a runbook to others and back to this host."""

    async def steps(view: Look) -> None:
        await view.tab.until("document.querySelector('#rows tr') !== null")
        await follow(view, "nav a[href='runbooks/']")
        await view.tab.until("document.querySelectorAll('.index li').length > 30")
        await follow(view, ".index a[href=GpuMemoryGrowing]")
        await view.tab.until("document.querySelector('.runbook h2')?.innerText === 'GpuMemoryGrowing'")
        await follow(view, ".runbook a[href=GpuMemoryLeakSuspected]")
        await view.tab.until("document.querySelector('.runbook h2')?.innerText === 'GpuMemoryLeakSuspected'")
        await follow(view, "nav a:first-child")
        await view.tab.until("document.querySelector('#rows tr') !== null")

    look(Shown(crowd(1, 1)), steps)
