"""The page behind a login, the runbooks, and the page of a snapshot, in a browser."""

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.integration.browser.conftest import Looking, violations
from tests.support.builders import NOW, Shown, crowd
from tests.support.certificates import Authority
from tests.support.chromium import Tab, tab
from tests.support.real_snapshots import NAMES, read
from tests.support.secured import ALICE, USERS, write_config
from tests.support.serving import LOOPBACK
from vramledger.web.app import serve
from vramledger_agent.torch_snapshots.html import snapshot_html


async def test_the_page_is_live_behind_a_login_and_tls(browser: str, tmp_path: Path) -> None:
    """Files, history and stream use the browser's login, and a new sample appears by itself."""
    own, file = Authority(tmp_path).sign("server"), tmp_path / "web.yml"
    write_config(file, f"tls_server_config:\n  cert_file: {own.certificate}\n  key_file: {own.key}\n{USERS}")
    shown = Shown(crowd(2, 3))
    config = replace(LOOPBACK, web_config=file)
    async with serve(config, shown) as (address,), tab(browser) as page:
        await page.call("Security.setIgnoreCertificateErrors", ignore=True)
        await page.go(f"https://{':'.join(ALICE)}@127.0.0.1:{address.port}/")
        await page.until("document.querySelectorAll('#rows tr').length === 6")
        await page.until("performance.getEntriesByType('resource').some((e) => e.name.endsWith('history'))")
        shown.snapshot = replace(crowd(2, 4, serial=2), time=NOW + 1)
        await page.until("document.querySelectorAll('#rows tr').length === 8")
        assert page.complaints == []
    # Connections say goodbye in TLS, and the loop has to live until the browser has answered: then only
    # the loop's own pipe is left.
    open_files = asyncio.get_running_loop()._selector.get_map()  # type: ignore[attr-defined]  # noqa: SLF001
    while len(open_files) > 1:  # noqa: ASYNC110 there is no event for it
        await asyncio.sleep(0.01)


CUT_OFF = (
    "[...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth"
    " || e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).overflowX !== 'visible')"
    ".map(e => e.outerHTML)"
)
"""Elements that are wider than the window, or have more content than they show."""


@pytest.mark.repeats(kept=5)  # one in each way, and the page that lists them
@pytest.mark.repeats(kept=4)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("name", ["GpuMemoryPreallocatedShared", "", "GpuMemoryLeakSuspected"])
async def test_a_runbook_can_be_read(look: Looking, name: str, width: int, theme: str) -> None:
    """Nothing is cut off and axe-core finds no violation: in both themes, on a screen and on a phone."""
    async with look(Shown(crowd(1, 1))) as page:
        await page.size(width, 900, mobile=width < 600)
        await page.prefer(prefers_color_scheme=theme)
        await page.go(f"{await page.run('location.href')}runbooks/{name}")
        assert await page.run(CUT_OFF) == []
        assert await page.run("document.documentElement.scrollWidth") == width
        ground = await page.run("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(13, 17, 23)" if theme == "dark" else "rgb(244, 246, 248)")
        assert await violations(page) == []


async def follow(page: Tab, link: str) -> None:
    """Follow a link; its page is gone afterwards, and cannot report the click."""
    await page.run(f"setTimeout(() => document.querySelector({json.dumps(link)}).click())")


async def test_from_the_page_to_a_runbook_and_back(look: Looking) -> None:
    """The page links to the list, the list to each runbook, a runbook to others and back to this host."""
    async with look(Shown(crowd(1, 1))) as page:
        await page.until("document.querySelector('#rows tr') !== null")
        await follow(page, "nav a[href='runbooks/']")
        await page.until("document.querySelectorAll('.index li').length > 30")
        await follow(page, ".index a[href=GpuMemoryGrowing]")
        await page.until("document.querySelector('.runbook h2')?.innerText === 'GpuMemoryGrowing'")
        await follow(page, ".runbook a[href=GpuMemoryLeakSuspected]")
        await page.until("document.querySelector('.runbook h2')?.innerText === 'GpuMemoryLeakSuspected'")
        await follow(page, "nav a:first-child")
        await page.until("document.querySelector('#rows tr') !== null")


OVER = """
(() => {
  const block = document.querySelector("SELECTOR");
  block.scrollIntoView();
  const box = block.getBoundingClientRect();
  const found = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
  return found.querySelector("title").textContent;
})()
"""


@pytest.mark.parametrize("name", NAMES)
async def test_hovering_names_the_allocation(browser: str, name: str, tmp_path: Path) -> None:
    """The four pictures are drawn in colours, and what is under the pointer says size, line and lifetime."""
    path = tmp_path / "page.html"
    path.write_text(snapshot_html(read(name, tmp_path), f"{name}.pickle"), encoding="utf-8")
    async with tab(browser) as page:
        await page.size(1280, 900)
        await page.go(path.as_uri())
        assert await page.run("document.querySelectorAll('svg').length") == 4
        assert await page.run("document.querySelectorAll('.segments .block').length") > 400
        assert await page.run("document.querySelectorAll('.lifetimes .block').length") > 2000
        over = await page.run(OVER.replace("SELECTOR", ".segments .block"))
        assert "MiB, " in over or "KiB, " in over
        assert "/home/ann/train.py" in over
        box = await page.run(OVER.replace("SELECTOR", ".lifetimes .block"))
        assert "from " in box
        assert "to " in box
        wide = await page.run("document.documentElement.scrollWidth <= innerWidth")
        assert wide, "nothing is wider than the window"
        assert page.complaints == []
