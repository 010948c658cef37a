"""Many clients: scrapers, viewers, readers that are slow or never read, while a device hangs.

8 GPUs with 64 holders each. The figures are of one scraper that asks 20 times a second, as it goes on in the
crowd; the crowd is on the same machine, so its own work is in them too.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.lab.bench.scene import scene
from tests.lab.soak.table import Row
from tests.support.exporter import Exporter, serving

SCRAPERS, VIEWERS, SLOW = 100, 200, 60
RATE = 20
_REQUEST = "GET {} HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nConnection: {}\r\n\r\n"
_MOST_P99 = 0.02
_GROWTH = 8 * 2**20


async def _ask(port: int, path: str = "/metrics") -> tuple[int, float]:
    """Return status and seconds of one request on a connection of its own."""
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_REQUEST.format(path, "close").encode())
        answer = await reader.read()
    finally:
        writer.close()
    return int(answer[9:12] or b"0"), time.perf_counter() - begun


async def _regular(port: int, seconds: float) -> list[float]:
    """Scrape regularly; a scrape that is refused does not count as fast."""
    taken = []
    begun = time.monotonic()
    for number in range(round(seconds * RATE)):
        await asyncio.sleep(max(0.0, begun + number / RATE - time.monotonic()))
        status, needed = await _ask(port)
        if status == 200:
            taken.append(needed)
    return taken


async def _scrape_on(port: int, pause: float, found: Counter[int]) -> None:
    while True:
        try:
            status, _ = await _ask(port)
        except OSError:
            status = 0
        found[status] += 1
        await asyncio.sleep(pause)


async def _view(port: int, events: Counter[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(_REQUEST.format("/api/v1/events", "keep-alive").encode())
        while data := await reader.read(1 << 16):
            events["bytes"] += len(data)
            events["pieces"] += 1
        events["ended"] += 1
    finally:
        writer.close()


async def _never_read(port: int) -> None:
    while True:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(_REQUEST.format("/metrics", "keep-alive").replace("gzip", "identity").encode() * 20)
        await asyncio.sleep(5)
        writer.close()


async def _crowd(  # noqa: PLR0913 - who is in it
    port: int, seconds: float, *, viewers: int = 0, scrapers: int = 0, pause: float = 0.0, slow: int = 0
) -> tuple[list[float], Counter[int], Counter[str]]:
    """Scrape regularly in a crowd; return the seconds, the others' answers, and the viewers' events."""
    answers: Counter[int] = Counter()
    events: Counter[str] = Counter()
    tasks = [asyncio.create_task(_view(port, events)) for _ in range(viewers)]
    tasks += [asyncio.create_task(_scrape_on(port, pause, answers)) for _ in range(scrapers)]
    tasks += [asyncio.create_task(_never_read(port)) for _ in range(slow)]
    await asyncio.sleep(2)
    taken = await _regular(port, seconds)
    for task in tasks:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError, OSError):
            await task
    return taken, answers, events


def _p99(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100, method="inclusive")[98]


def _row(what: str, times: Sequence[float], most: float | None, note: str = "") -> Row:
    if len(times) < RATE:
        return Row(what, f"only {len(times)} scrapes were answered{note}", good=False)
    p99 = _p99(times)
    text = f"p50 {statistics.median(times) * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms of {len(times)}{note}"
    return Row(what, text, good=None if most is None else p99 <= most)


def _measure(exporter: Exporter, hang: object, mend: object, seconds: float) -> Iterator[Row]:
    port = exporter.port
    process = psutil.Process(exporter.process.pid)
    yield _row("one scraper", asyncio.run(_regular(port, seconds)), _MOST_P99)
    hang()  # type: ignore[operator]
    exporter.until(lambda page: page.device_up(3) == 0, "a device to hang")
    yield _row("one scraper while a device hangs", asyncio.run(_regular(port, seconds)), _MOST_P99)
    mend()  # type: ignore[operator]
    before = process.memory_info().rss
    taken, answers, events = asyncio.run(_crowd(port, seconds, viewers=VIEWERS, scrapers=SCRAPERS, pause=1.0))
    note = (
        f"; {dict(answers)} for the others, {events['bytes'] / 1e6:.1f} MB of events, {events['ended']} ended"
    )
    yield _row(f"{SCRAPERS} scrapers a second and {VIEWERS} viewers", taken, None, note)
    taken, answers, _ = asyncio.run(_crowd(port, seconds, scrapers=SCRAPERS))
    yield _row(f"a storm: {SCRAPERS} scrapers without a pause", taken, None, f"; {dict(answers)}")
    taken, _, _ = asyncio.run(_crowd(port, seconds, slow=SLOW))
    yield _row(f"{SLOW} readers that never read", taken, None)
    first = process.memory_info().rss
    for _ in range(3):
        asyncio.run(_crowd(port, seconds / 2, viewers=VIEWERS, scrapers=SCRAPERS, slow=SLOW))
    again = process.memory_info().rss
    once, more = ((b - a) / 2**20 for a, b in ((before, first), (first, again)))
    text = f"{once:+.1f} MiB at first, {more:+.1f} MiB by three times more"
    yield Row("growth of the exporter", text, good=again - first < _GROWTH)
    yield Row("descriptors afterwards", str(process.num_fds()), good=process.num_fds() < 50)


def run(directory: Path, *, seconds: float) -> Iterator[Row]:
    """Yield the rows of the table."""
    with scene(directory, 8, 64) as here, serving(driver=here.env) as exporter:
        exporter.until(lambda page: page.up, "data")
        standin = here.standin
        yield from _measure(
            exporter, lambda: standin.hang("nvmlDeviceGetMemoryInfo_v2", 3), standin.release, seconds
        )
