"""What does the live page cost a viewer's browser, by its clock, and the exporter with 1 and 200 viewers?"""

import asyncio
import gzip
import http.client
import selectors
import shutil
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from tests.lab.bench import cost
from tests.lab.bench.programs import Program, running
from tests.lab.bench.scene import Scene
from tests.lab.bench.table import Row
from tests.support.chromium import chromium, tab

VIEWERS = 200
_PAINT = 0.3
_UPDATE = 0.016
_PAYLOAD = 150_000
_TIMES = 2
_WARM_UP = 4.0
_ASK = b"GET /api/v1/events HTTP/1.1\r\nHost: bench\r\nAccept-Encoding: gzip\r\n\r\n"


@contextmanager
def _viewers(port: int, count: int) -> Iterator[None]:
    """Have many streams open and read, as fast as they come, for the length of the block."""
    over = threading.Event()
    with ExitStack() as stack:
        watched = stack.enter_context(selectors.DefaultSelector())
        for _ in range(count):
            viewer = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            viewer.sendall(_ASK)
            viewer.setblocking(False)
            watched.register(viewer, selectors.EVENT_READ, viewer.recv)

        def read() -> None:
            while not over.is_set():
                for key, _ in watched.select(0.2):
                    key.data(1 << 20)

        reading = threading.Thread(target=read)
        reading.start()
        stack.callback(reading.join)
        stack.callback(over.set)
        yield


def _cpu(program: Program, viewers: int, seconds: int) -> float:
    with _viewers(program.port, viewers):
        time.sleep(1.0)
        with cost.cpu_share(program.pid) as share:
            time.sleep(seconds)
        return share[0]


def _event(port: int) -> int:
    """Return the bytes on the wire of the first event, which has all rows."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as viewer:
        viewer.sendall(_ASK)
        taken, told = 0, time.monotonic()
        viewer.settimeout(0.3)
        while time.monotonic() - told < 1:
            try:
                taken += len(viewer.recv(1 << 20))
            except TimeoutError:
                if taken > 1000:
                    break
        return taken


def _wire(port: int, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    text = gzip.decompress(body) if answer.headers["Content-Encoding"] == "gzip" else body
    return len(body), text.decode()


async def _look(address: str, port: int, holders: int, seconds: int) -> tuple[float, list[float]]:
    """Return seconds to the first paint, and of scripting of each update."""
    async with tab(address) as page:
        await page.size(1440, 900)
        await page.go(f"http://127.0.0.1:{port}/")
        await page.until(f"document.querySelectorAll('#rows tr').length === {holders}")
        paint = await page.run("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        await page.run("performance.clearMeasures()")
        await asyncio.sleep(seconds)
        updates = await page.run("performance.getEntriesByName('draw').map(e => e.duration)")
        return paint / 1000, [each / 1000 for each in updates]


def measure(scene: Scene, *, turns: int, seconds: int) -> Iterator[Row]:
    """Yield the cost of the page; without a browser only the exporter's part."""
    at = scene.name
    with running(scene, "ours") as program:
        time.sleep(_WARM_UP)
        if found := shutil.which("chromium"):
            holders = scene.devices * scene.holders
            with chromium(Path(found)) as address:
                look = partial(_look, address, program.port, holders, seconds)
                looks = [asyncio.run(look()) for _ in range(turns + 1)][1:]
            updates = [each for _, taken in looks for each in taken]
            paint = statistics.median(each for each, _ in looks)
            yield Row(at, "page: first paint", paint, unit="s", bar=_PAINT)
            what = f"page: scripting of an update, median of {len(updates)}"
            yield Row(at, what, statistics.median(updates), unit="s", bar=_UPDATE)
        size, text = _wire(program.port, "/")
        files = {part.split('"')[0] for part in text.split('="')[1:] if part.startswith("page/")}
        size += sum(_wire(program.port, f"/{each}")[0] for each in (*files, "api/v1/history"))
        size += _event(program.port)
        yield Row(at, "page: all that it loads, on the wire", size, unit="B", bar=_PAYLOAD)
        none = _cpu(program, 0, seconds)
        pairs = [(_cpu(program, 1, seconds), _cpu(program, VIEWERS, seconds)) for _ in range(turns)]
        one, many = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
        yield Row(at, "CPU with one viewer", one, none, "CPU", against="no viewer")
        yield Row(at, f"CPU with {VIEWERS} viewers", many, one, "CPU", bar=_TIMES, against="one viewer")
