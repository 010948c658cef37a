"""A scrape gets the newest snapshot, and never one that is too old."""

import asyncio

from msgspec.structs import replace

from vramledger.model.snapshot import Snapshot
from vramledger.serving.publisher import SnapshotPublisher

BLANK = Snapshot(recording="film", failures={"timeout": 0})
FRESH = replace(BLANK, serial=1, up=True, time=1000.0, failures={"timeout": 3}, recording=None)


def board(lifetime: float | None, shot: Snapshot, age: float = 0.0) -> tuple[SnapshotPublisher, list[float]]:
    """Make a publisher that shows a snapshot since 0, and the time of its clock."""
    now = [0.0]
    made = SnapshotPublisher(BLANK, lifetime=lifetime, clock=lambda: now[0])
    asyncio.run(made.publish(shot, age))
    return made, now


def test_a_snapshot_is_shown_for_its_lifetime_only() -> None:
    """At the limit it is shown; beyond it there is up 0 with its time, and no data."""
    made, now = board(3.5, FRESH)
    now[0] = 3.5
    assert made.snapshot is FRESH
    now[0] = 3.6
    shown = made.snapshot
    assert (shown.failure or ("",))[0] == "timeout"
    assert shown == replace(BLANK, serial=1, time=1000.0, failure=shown.failure, failures={"timeout": 3})
    assert made.ready


def test_a_sample_that_was_published_late_is_not_shown_for_longer() -> None:
    """Its lifetime begins when it ended: the exporter may have been stopped between the two."""
    assert board(3.5, FRESH, age=3.5)[0].snapshot is FRESH
    assert not board(3.5, FRESH, age=3.6)[0].snapshot.up


def test_what_does_not_age() -> None:
    """The reason of a sampler's end, and a recording."""
    failed = replace(BLANK, serial=2, failure=("no-driver", "load it"))
    made, now = board(3.5, failed)
    now[0] = 100.0
    assert made.snapshot is failed
    made, now = board(None, FRESH)
    now[0] = 1e6
    assert made.snapshot is FRESH


def test_waiting_for_a_newer_snapshot_ends_with_it() -> None:
    """A reader that has seen one snapshot gets the next, and not the same one again."""

    async def test() -> Snapshot:
        made = SnapshotPublisher(BLANK)
        await made.publish(FRESH)
        waiting = asyncio.create_task(made.wait_for_newer(FRESH.serial))
        await asyncio.sleep(0)
        assert not waiting.done()
        await made.publish(replace(FRESH, serial=2))
        return await asyncio.wait_for(waiting, 30)

    assert asyncio.run(test()).serial == 2
