"""A real Chromium without a window, controlled directly through its own protocol (CDP)."""

import asyncio
import base64
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.waiting import PATIENCE

_FLAGS = (
    "--no-sandbox",  # as root there is no other way, and the pages are our own
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
    *("--hide-scrollbars", "--force-color-profile=srgb", "--remote-debugging-port=0"),
)


@contextmanager
def chromium(program: Path) -> Iterator[str]:
    """Run a browser for the length of the block; yields the address of its debugging socket."""
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        log = Path(profile, "log")
        with log.open("wb") as errors:
            command: list[str | Path] = [program, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
            browser = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors)
        try:
            yield _address(browser, Path(profile, "DevToolsActivePort"), log)
        finally:
            browser.terminate()
            try:
                browser.wait(PATIENCE)
            except subprocess.TimeoutExpired:  # pragma: no cover - it hangs
                browser.kill()
                browser.wait()


def _address(browser: subprocess.Popen[bytes], told: Path, log: Path) -> str:
    deadline = time.monotonic() + 2 * PATIENCE
    while time.monotonic() < deadline:
        lines = told.read_text(encoding="utf-8").split() if told.exists() else []
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        if browser.poll() is not None:
            break
        time.sleep(0.02)
    raise RuntimeError(f"chromium did not start: {log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


class NavigationError(RuntimeError):
    """The requested page has gone, and the next one is not there yet."""


_BETWEEN_PAGES = (
    *("Inspected target navigated", "Execution context was destroyed"),
    *("Cannot find context", "Cannot find default execution context"),
)
"""Chromium's answer for a page that it leaves at that moment."""


class Tab:
    """One page of the browser; ``complaints`` are those of the console, the content policy and scripts."""

    def __init__(self, socket: Any) -> None:  # noqa: ANN401 generic since aiohttp 3.14
        self.complaints: list[str] = []
        self._socket = socket
        self._session = ""
        self._number = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[str, asyncio.Event] = {}

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:  # noqa: ANN401 the protocol's
        self._number += 1
        answer = self._waiting[self._number] = asyncio.get_running_loop().create_future()
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        return await asyncio.wait_for(answer, PATIENCE)

    async def listen(self) -> None:
        """Handle a message of the browser."""
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._waiting.pop(told["id"])
                if answer.done():  # no caller waits any more
                    continue
                if "error" in told:
                    said = str(told["error"])
                    between = any(words in said for words in _BETWEEN_PAGES)
                    answer.set_exception((NavigationError if between else RuntimeError)(said))
                else:
                    answer.set_result(told["result"])
            elif told["method"] == "Log.entryAdded":
                entry = told["params"]["entry"]
                self.complaints.append(f"{entry['text']} {entry.get('url', '')}")
            elif told["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(told["params"]["exceptionDetails"]))
            else:
                event = self._events.setdefault(told["method"], asyncio.Event())
                if told["method"] == "Page.frameNavigated" and not event.is_set():
                    self.complaints.clear()  # they were of the page that was there before
                event.set()

    async def open(self) -> None:
        """Take the browser's one page, which still shows what the test before has left, without its cache.

        With a page and a context of its own each test cost a second of CPU time: four new processes.
        """
        targets = (await self.call("Target.getTargets"))["targetInfos"]
        (page,) = (target["targetId"] for target in targets if target["type"] == "page")
        attached = await self.call("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        await self.call("Network.clearBrowserCache")
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def size(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Give the page a size in CSS pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        await self.call("Emulation.setDeviceMetricsOverride", **size)

    async def prefer(self, **features: str) -> None:
        """Set media features of the reader's system, for example ``prefers_color_scheme="dark"``."""
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        await self.call("Emulation.setEmulatedMedia", features=wanted)

    async def go(self, url: str) -> None:
        loaded = self._events["Page.loadEventFired"] = asyncio.Event()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(loaded.wait(), PATIENCE)

    async def run(self, script: str) -> Any:  # noqa: ANN401 whatever the script gives
        """Return the result of an expression in the page; wait for a promise."""
        told = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in told:
            raise AssertionError(told["exceptionDetails"])
        return told["result"].get("value")

    async def until(self, condition: str, what: str = "") -> Any:  # noqa: ANN401 see run
        """Wait until an expression is true in the page, and return its value."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while asyncio.get_running_loop().time() < deadline:
            with contextlib.suppress(NavigationError):  # between two pages
                if value := await self.run(condition):
                    return value
            await asyncio.sleep(0.02)
        message = f"waited in vain for {what or condition}; the page says:\n{await self.text('body')}"
        raise AssertionError(message)

    async def text(self, selector: str) -> str:
        return str(await self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def texts(self, selector: str) -> list[str]:
        """Return the texts of all visible elements that match."""
        shown = f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.checkVisibility())"
        return list(await self.run(f"{shown}.map(e => e.textContent)"))

    async def click(self, selector: str) -> None:
        """Click on an element as a person does: where and when it is on the screen, and again if it moved."""
        find = f"document.querySelector({json.dumps(selector)})"
        place = (
            f"(() => {{ const e = {find}; if (!e) return null; e.scrollIntoView({{block: 'center'}});"
            " const b = e.getBoundingClientRect(), x = b.x + b.width / 2, y = b.y + b.height / 2;"
            " if (!e.contains(document.elementFromPoint(x, y))) return null;"
            " window.wasHit = false;"
            " e.addEventListener('click', () => { window.wasHit = true; }, {capture: true, once: true});"
            " return {x, y}; })()"
        )
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while asyncio.get_running_loop().time() < deadline:
            point: Mapping[str, float] = await self.until(place, f"{selector} to be there")
            for kind in ("mousePressed", "mouseReleased"):
                await self.call("Input.dispatchMouseEvent", type=kind, **point, button="left", clickCount=1)
            if await self.run("window.wasHit"):
                return
        raise AssertionError(f"clicked in vain on {selector}")

    async def press(self, key: str) -> None:
        """Press a key by its name, such as ``Tab`` or ``Enter``."""
        named = {"key": key, "code": key}
        code = {"Tab": 9, "Enter": 13, "Home": 36, "ArrowLeft": 37}[key]
        for kind, text in (("keyDown", {"text": "\r"} if key == "Enter" else {}), ("keyUp", {})):
            await self.call("Input.dispatchKeyEvent", type=kind, windowsVirtualKeyCode=code, **named, **text)

    async def type(self, text: str) -> None:
        await self.call("Input.insertText", text=text)

    async def picture(self) -> bytes:
        """Return a screenshot of the whole page as PNG."""
        told = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(told["data"])


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Tab]:
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Tab(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.open()
            yield page
        finally:
            listening.cancel()
            await asyncio.wait({listening})
