"""Renders are shared: a page of a snapshot is written once for all requests."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from vramledger.model.snapshot import Snapshot
from vramledger.web.scrape import RenderCache


def counted(calls: list[str], name: str, gate: threading.Event | None = None) -> Callable[[], bytes]:
    """Make a render that records its name when it runs."""

    def make() -> bytes:
        calls.append(name)
        if gate is not None:
            assert gate.wait(20)
        return name.encode()

    return make


@pytest.fixture
def renders() -> Iterator[RenderCache]:
    with closing(RenderCache(clock=lambda: 0.0)) as made:
        yield made


async def test_one_render_for_all_who_ask_for_the_same(renders: RenderCache) -> None:
    """Requests during or after a render of a snapshot share it; another page or snapshot has its own."""
    calls, gate = list[str](), threading.Event()
    asked = [renders.share(Snapshot(1), "text", counted(calls, "a", gate)) for _ in range(5)]
    first = list(map(asyncio.create_task, asked))
    await asyncio.sleep(0)
    gate.set()

    assert await asyncio.gather(*first) == [b"a"] * 5
    assert await renders.share(Snapshot(1), "text", counted(calls, "b")) == b"a"
    assert await renders.share(Snapshot(1), "gzip", counted(calls, "c")) == b"c"
    assert await renders.share(Snapshot(2), "text", counted(calls, "d")) == b"d"
    assert calls == ["a", "c", "d"]


async def test_a_page_that_was_quick_needs_no_thread(renders: RenderCache) -> None:
    """A page is rendered in the loop after it was quick, otherwise in a thread; all share it."""
    threads, ended = list[str](), threading.Event()

    def make(*, slow: bool) -> Callable[[], bytes]:
        def render() -> bytes:
            threads.append(threading.current_thread().name)
            if slow:
                assert ended.wait(0.05) is False
            return b"page"

        return render

    for serial, slow in enumerate((False, False, True, False, False)):
        pages = [renders.share(Snapshot(serial), "text", make(slow=slow)) for _ in range(3)]
        assert await asyncio.gather(*pages) == [b"page"] * 3
    assert [name == threading.main_thread().name for name in threads] == [False, True, True, False, True]


@pytest.mark.parametrize("quick", [False, True], ids=["in a thread", "in the loop"])
async def test_a_failed_render_is_not_kept(renders: RenderCache, *, quick: bool) -> None:
    """All that waited for it get its error, and the next request gets a new render."""

    def broken() -> bytes:
        raise ValueError("torn")

    if quick:
        await renders.share(Snapshot(0), "x", lambda: b"quick")
    both = [renders.share(Snapshot(1), "x", broken) for _ in range(2)]

    assert [str(each) for each in await asyncio.gather(*both, return_exceptions=True)] == ["torn", "torn"]
    assert await renders.share(Snapshot(1), "x", lambda: b"healed") == b"healed"


async def test_a_render_is_used_for_a_second_at_most() -> None:
    """A page of the same snapshot is rendered again a second later: our own figures change."""
    now = 10.0
    calls: list[str] = []
    renders = RenderCache(clock=lambda: now)
    await renders.share(Snapshot(1), "text", counted(calls, "a"))
    now = 11.0

    assert await renders.share(Snapshot(1), "text", counted(calls, "b")) == b"b"


async def test_a_snapshot_without_its_data_has_a_render_of_its_own(renders: RenderCache) -> None:
    """After a suspend, during which our clock may stop, an earlier page is not shown as current."""
    calls: list[str] = []
    await renders.share(Snapshot(1, up=True), "text", counted(calls, "a"))
    blanked = Snapshot(1, up=False, failure=("timeout", "the exporter was stopped"))

    assert await renders.share(blanked, "text", counted(calls, "b")) == b"b"
    assert await renders.share(Snapshot(1, up=False), "text", counted(calls, "c")) == b"c"


async def test_who_leaves_does_not_take_the_render_away(renders: RenderCache) -> None:
    """When the first of two clients is cancelled, the second still gets the page."""
    calls, gate = list[str](), threading.Event()
    first = asyncio.create_task(renders.share(Snapshot(1), "text", counted(calls, "a", gate)))
    second = asyncio.create_task(renders.share(Snapshot(1), "text", counted(calls, "b", gate)))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.set()

    assert await second == b"a"


async def test_invented_wishes_do_not_fill_the_memory(renders: RenderCache) -> None:
    """Only a few pages of one snapshot are kept, however many are requested; all requests are answered."""
    calls: list[str] = []
    for _ in range(2):
        for number in range(100):
            page = await renders.share(Snapshot(1), number, counted(calls, str(number)))
            assert page == str(number).encode()

    assert len(calls) == 200 - 16
