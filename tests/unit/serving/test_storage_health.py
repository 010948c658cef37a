"""What the exporter says of its storage: confirmed is stored, silence is not, no loss counts twice."""

from typing import Any

import pytest

from vramledger.metrics.storage import StorageFigures, collect
from vramledger.serving.storage_health import LATE_SECONDS, NO_ANSWER, StorageHealth


class _Watched:
    """The health of a storage, with clocks that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.health = StorageHealth(2**29, 604800.0, clock=lambda: self.now, monotonic=lambda: self.now)

    def figures(self) -> StorageFigures:
        """Return what the exporter would serve now."""
        return self.health.figures()

    def confirm(self, stored: int, dropped: int = 0, **more: Any) -> None:  # noqa: ANN401 fields of a status
        """Let the process that stores say what it has done."""
        status = {
            "stored": stored,
            "dropped": dropped,
            "written": 100 * stored,
            "newest": self.now if stored else None,
            "size": None,
            "oldest": None,
            "error": None,
            "house_error": None,
        }
        self.health.record_status({**status, **more})


def served(figures: StorageFigures) -> dict[str, float]:
    """Return the values by the end of their name."""
    return {
        family.name.removeprefix("vramledger_storage_"): value
        for family, samples in collect(figures)
        for _, value in samples
    }


def test_before_anything_is_confirmed_nothing_is_called_stored() -> None:
    """A storage of which nothing is known yet is neither up nor down, and has no size and no time."""
    watched = _Watched()
    watched.health.record_sent(1)
    assert set(served(watched.figures())) == {
        "retention_limit_bytes",
        "retention_limit_seconds",
        "written_bytes_total",
        "dropped_samples_total",
        "restarts_total",
    }
    watched.confirm(0, size=0)
    assert served(watched.figures())["size_bytes"] == 0
    assert watched.figures().up is None


def test_silence_is_not_health() -> None:
    """A process that has not confirmed a reading for 30 s does not store, whatever it said before."""
    watched = _Watched()
    watched.health.record_sent(1)
    watched.confirm(1)
    assert watched.figures().up
    watched.now += 1000
    assert watched.figures().up, "nothing was sent"
    watched.health.record_sent(1)
    watched.now += LATE_SECONDS
    assert watched.figures().up
    watched.now += 1
    assert watched.figures().up is False
    assert watched.figures().last_error == (watched.now, NO_ANSWER)
    watched.confirm(2)
    assert watched.figures().up
    assert watched.figures().last_error == (watched.now, NO_ANSWER), "the newest error stays known"


def test_a_status_without_progress_is_no_answer() -> None:
    """A process that speaks but stores none of what it gets does not store."""
    watched = _Watched()
    watched.health.record_sent(1)
    watched.confirm(1)
    for _ in range(10):
        watched.health.record_sent(4)
        watched.now += 4
        watched.confirm(1)
    assert watched.figures().up is False


def test_a_failing_disk_is_said_with_its_error() -> None:
    """While the disk fails the storage is down; the first reading on the disk makes it up again."""
    watched = _Watched()
    watched.health.record_sent(3)
    watched.confirm(1)
    watched.confirm(1, dropped=2, error="No space left on device")
    assert (watched.figures().up, watched.figures().dropped) == (False, 2)
    watched.confirm(1, dropped=2)
    assert watched.figures().up is False, "nothing new is on the disk"
    watched.health.record_sent(1)
    watched.confirm(2, dropped=2)
    assert (watched.figures().up, watched.figures().dropped) == (True, 2)


def test_counters_go_on_over_a_restart() -> None:
    """What was not confirmed is lost, and bytes, losses and times do not go back with a new process."""
    watched = _Watched()
    watched.health.record_sent(10)
    watched.confirm(6, dropped=1)
    watched.health.record_end("killed")
    assert (watched.figures().up, watched.figures().dropped, watched.figures().written) == (False, 4, 600)
    watched.health.record_dropped(2, "ended")
    watched.health.record_restart()
    newest = watched.figures().newest
    watched.confirm(0)
    assert (watched.figures().newest, watched.figures().written) == (newest, 600)
    watched.health.record_sent(1)
    watched.confirm(1)
    assert watched.figures().up
    assert (watched.figures().dropped, watched.figures().written, watched.figures().restarts) == (6, 700, 1)


@pytest.mark.parametrize("ends", [1, 2, 3])
def test_nothing_is_lost_twice(ends: int) -> None:
    """Ends that follow each other without a reading lose nothing more."""
    watched = _Watched()
    watched.health.record_sent(3)
    for _ in range(ends):
        watched.health.record_end("killed")
    assert watched.figures().dropped == 3


def test_old_files_that_stay_are_an_error_and_no_loss() -> None:
    """A failure to thin or remove is the last error while readings are stored; a loss comes before it."""
    watched = _Watched()
    watched.health.record_sent(2)
    watched.confirm(1, house_error="old files stay")
    assert watched.figures().up
    assert watched.figures().last_error == (watched.now, "old files stay")
    watched.confirm(1, dropped=1, error="full", house_error="old files stay")
    assert (watched.figures().up, watched.figures().last_error) == (False, (watched.now, "full"))
    watched.confirm(1, dropped=1, house_error="old files stay")
    assert watched.figures().last_error == (watched.now, "full"), "this is why nothing is stored"
    watched.health.record_sent(1)
    watched.confirm(2, dropped=1, house_error="old files stay")
    assert (watched.figures().up, watched.figures().last_error) == (True, (watched.now, "old files stay"))


def test_a_size_that_is_not_known_any_more_is_absent() -> None:
    """When the process that stores cannot count the files, no earlier size is served as today's."""
    watched = _Watched()
    watched.confirm(0, size=7, oldest=5.0)
    assert (watched.figures().size, watched.figures().oldest) == (7, 5.0)
    watched.confirm(0)
    assert (watched.figures().size, watched.figures().oldest) == (None, None)


def test_who_has_given_up_is_never_up_again() -> None:
    """After a bug in what records, readings that are confirmed later do not make the storage up."""
    watched = _Watched()
    watched.health.record_sent(2)
    watched.confirm(1)
    watched.health.record_given_up("a bug")
    watched.confirm(2, house_error="old files stay")
    assert (watched.figures().up, watched.figures().last_error) == (False, (watched.now, "a bug"))
    watched.health.record_end("killed")
    watched.health.record_restart()
    watched.confirm(1)
    assert watched.figures().up is False
