"""The page of an allocation snapshot, in a real browser, of a real training."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.chromium import tab
from tests.support.real_snapshots import NAMES, read
from vramledger_agent.torch_snapshots.html import snapshot_html

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
def test_hovering_names_the_allocation(browser: str, name: str, tmp_path: Path) -> None:
    """The four pictures are drawn in colours, and what is under the pointer says size, line and lifetime."""
    path = tmp_path / "page.html"
    path.write_text(snapshot_html(read(name, tmp_path), f"{name}.pickle"), encoding="utf-8")

    async def test() -> None:
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

    asyncio.run(test())
