"""The page's slider shows the ledger as it was, by keyboard, by touch and by a link, in a real browser."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.support.builders import Shown
from tests.support.chromium import Tab, tab
from tests.support.host.model import EPOCH, GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.past import StoredPast
from tests.support.serving import LOOPBACK, served
from vramledger.errors import VramledgerError
from vramledger.storage.answers import answer
from vramledger.web.services import PageState

LENGTH = 900
"""Seconds of the stored past."""


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> StoredPast:
    """Store a quarter of an hour: one holder always, and one that came after 300 s and went after 600 s."""
    guest = Process(2000, {0: Fixed(8 * GIB)}, begin=300.0, end=600.0, user="eve", command="guest.py")
    always = Process(1000, {0: Fixed(2 * GIB, work=0.5)}, begin=-900.0, user="ada", command="always.py")
    past = StoredPast(tmp_path_factory.mktemp("past"), Host([Gpu()], [always, guest], Random(1)))  # noqa: S311 a simulation
    past.watch(LENGTH)
    past.process.flush()
    return past


@asynccontextmanager
async def visiting(browser: str, past: StoredPast, address: str = "") -> AsyncIterator[Tab]:
    """Open the page; the span of its slider is moved to the time of the simulation."""

    async def ask(question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        if question["ask"] == "slider":
            question = {"ask": "slider", "from": EPOCH, "to": EPOCH + LENGTH}
        head, _, content = (await asyncio.to_thread(answer, past.path, question)).partition(b"\n")
        return json.loads(head), content

    state = PageState(past=ask)
    live = Shown(past.tracker.blank)
    async with served(live, LOOPBACK, state=state) as client, tab(browser) as page:
        await page.size(1280, 900)
        await page.go(f"http://127.0.0.1:{client.port}/{address}")
        await page.until("!document.getElementById('past').hidden", "the slider")
        yield page
        assert page.complaints == []


async def shows(visit: Tab, pids: list[str]) -> None:
    listed = "[...document.querySelectorAll('#rows .column-pid')].map(e => e.textContent.trim()).sort()"
    await visit.until(f"JSON.stringify({listed}) === {json.dumps(json.dumps(pids, separators=(',', ':')))}")


async def keep_picture(visit: Tab, name: str) -> None:
    """Write a picture for a person, if a folder is named."""
    if folder := os.environ.get("VRAMLEDGER_PICTURES"):
        Path(folder, name).write_bytes(await visit.picture())  # noqa: ASYNC240 a few kB


async def test_a_link_may_give_milliseconds(browser: str, past: StoredPast) -> None:
    """A link of Grafana, which knows milliseconds alone, shows the same moment as one in seconds."""
    links = {"1795234210999": 1795234210, "1795234211000": 1795234211, "1795234212": 1795234212}
    async with visiting(browser, past, "#at=1795234210999") as visit:
        # On one page, which opens once: on a busy machine that takes most of the time of a test.
        for link, at in links.items():
            await visit.run(f"location.hash = '#at={link}'")
            names = "performance.getEntriesByType('resource').map(each => each.name)"
            asked = f"{names}.some(name => name.endsWith('/past?at={at}'))"
            await visit.until(asked, f"{link} is requested in seconds")


async def test_a_link_shows_the_ledger_as_it_was(browser: str, past: StoredPast) -> None:
    """A link with #at= shows ledger and holders of that time, and says loudly that it is the past."""
    async with visiting(browser, past, f"#at={EPOCH + 450}") as visit:
        await shows(visit, ["1000", "2000"])
        notice = await visit.text("#past-notices")
        assert "THE PAST" in notice
        assert "10.0 GiB of" in await visit.text(".used")
        assert await visit.run("document.querySelectorAll('.chart .area').length") >= 2
        assert await visit.texts(".plot .axis span") == ["15 min ago", "then"]
        assert await visit.run("document.querySelectorAll('.past-scale .mark').length") >= 2
        legend = await visit.texts("#past .legend > span")
        assert len(legend) == await visit.run("document.querySelectorAll('#past .swatch').length") == 4
        assert "bytes in use" in legend[0]
        for theme in ("light", "dark"):
            await visit.prefer(prefers_color_scheme=theme)
            await keep_picture(visit, f"page-past-{theme}.png")
        await visit.size(390, 844, mobile=True)
        assert await visit.run("document.documentElement.scrollWidth") <= 390
        await keep_picture(visit, "page-past-phone.png")
        await visit.size(1280, 900)
        await visit.click("#past-live")
        await visit.until("!document.body.classList.contains('past') && location.hash === ''")


async def test_the_slider_works_by_keyboard(browser: str, past: StoredPast) -> None:
    """Arrows move through time, the event buttons go from mark to mark, and the address follows."""
    async with visiting(browser, past) as visit:
        await visit.run("document.getElementById('past-slider').focus()")
        await visit.press("Home")
        await shows(visit, ["1000"])
        await visit.run("document.getElementById('past-after').focus()")
        await visit.press("Enter")
        await shows(visit, ["1000", "2000"])
        assert await visit.run("location.hash") == f"#at={EPOCH + 300}"
        await visit.run("document.getElementById('past-slider').focus()")
        await visit.press("ArrowLeft")
        await shows(visit, ["1000"])
        spoken = await visit.run("document.getElementById('past-slider').getAttribute('aria-valuetext')")
        assert spoken not in ("", "now, live")


async def test_the_slider_works_by_touch(browser: str, past: StoredPast) -> None:
    """On a phone a finger on the slider goes to that moment."""
    async with visiting(browser, past) as visit:
        await visit.size(390, 844, mobile=True)
        await visit.call("Emulation.setTouchEmulationEnabled", enabled=True)
        box = await visit.run(
            "(() => { const e = document.querySelector('#past-slider');"
            " e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        left, top, width, height = box
        assert height >= 44, "a finger needs room"
        point = {"x": left + width / 2, "y": top + height / 2}
        await visit.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
        await visit.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        await shows(visit, ["1000", "2000"])


async def test_a_moment_before_the_first_is_not_shown_as_empty(browser: str, past: StoredPast) -> None:
    """Of a time from which nothing is stored the page says that, and shows no holder and no zero."""
    async with visiting(browser, past, "#at=100") as visit:
        await visit.until("document.getElementById('past-notices').textContent.includes('stored')")
        assert await visit.texts("#rows .column-pid") == []
        assert not await visit.run("document.getElementById('summary').checkVisibility()")


async def test_the_past_costs_the_exporter_little(past: StoredPast) -> None:
    """Who asks for the same moment gets the kept answer, and who asks for many must wait."""
    asked: list[dict[str, Any]] = []

    async def ask(question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        asked.append(question)
        if question["at"] < EPOCH:
            raise VramledgerError("nothing is stored of that time")
        return {}, b"{}"

    async with served(Shown(past.tracker.blank), LOOPBACK, state=PageState(past=ask)) as client:
        for _ in range(30):
            assert (await client.ask(f"/api/v1/past?at={EPOCH + 5}")).status == 200
        assert len(asked) == 1
        statuses = [(await client.ask(f"/api/v1/past?at={EPOCH + each}")).status for each in range(100, 200)]
        assert statuses.count(503) > 50
        assert (await client.ask("/api/v1/past?at=NaN")).status == 400
        assert (await client.ask("/api/v1/past/scale?from=5&to=1")).status == 400
