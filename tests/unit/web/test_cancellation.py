"""Tasks end when they are cancelled."""

import asyncio

import pytest

from vramledger.web import cancellation


async def test_who_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """If something swallows a cancellation, as asyncio.wait_for may, the task still ends."""
    monkeypatch.setattr(cancellation, "_REPEAT_AFTER", 0.01)

    async def deaf() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    over, first, other = (asyncio.create_task(each) for each in (asyncio.sleep(0), deaf(), deaf()))
    await over
    await cancellation.cancel_and_wait(over, first, other)
    assert [each.cancelled() for each in (over, first, other)] == [False, True, True]
    await cancellation.cancel_and_wait()


async def test_a_background_task_ends_with_its_block() -> None:
    """A task runs while its block does, and ends with the block, also after an error."""
    running: list[bool] = []

    async def work() -> None:
        running.append(True)
        try:
            await asyncio.Event().wait()
        finally:
            running.clear()

    async def fail() -> None:
        async with cancellation.background_task(work()):
            await asyncio.sleep(0)
            assert running == [True]
            raise ValueError("torn")

    with pytest.raises(ValueError, match="torn"):
        await fail()
    assert running == []
