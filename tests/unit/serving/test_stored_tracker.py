"""A new exporter goes on from what was stored of this boot, and of no other."""

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest

from tests.support.host.model import GIB, Gpu, Host, Process
from tests.support.host.programs import Fixed
from tests.support.past import BOOT_ID, IDLE_AFTER, StoredPast
from tests.support.sure import sure
from vramledger.accounting.tracker import HoldingTracker
from vramledger.agent_server.connection import Peer
from vramledger.metrics.storage import LATE_SECONDS, NO_ANSWER, StorageFigures, StorageHealth, collect
from vramledger.model.reading import Reading
from vramledger.model.snapshot import Holding, Snapshot, State
from vramledger.serving.control_messages import At, ControlError, StorageError
from vramledger.serving.control_socket import Caller
from vramledger.serving.exporter import PastDesk
from vramledger.serving.storage import Storage, StoredTracker
from vramledger.storage.answers import answer, open_past
from vramledger.storage.protocol import ADD, AT, RESTORE
from vramledger.storage.recorder import Recorder
from vramledger.storage.state import compute
from vramledger.views.timeline import Timeline

PID = 7
WATCHED = int(IDLE_AFTER) + 60


class _Sink:
    """Takes the place of the process that stores: keeps what it is sent."""

    def __init__(self) -> None:
        self.again = threading.Event()
        self.health = StorageHealth(2**29, 604800.0)
        self.sent: list[tuple[bytes, bytes]] = []

    def send(self, messages: Iterable[tuple[bytes, bytes]]) -> None:
        self.sent += messages


def quiet_host() -> Host:
    """Return a host with one holder that does nothing."""
    process = Process(PID, {0: Fixed(GIB)}, begin=-900.0, user="ann")
    return Host([Gpu()], [process], Random(1))  # noqa: S311 a simulation


def stored_past(path: Path) -> StoredPast:
    """Return the past of an exporter that has ended after its holder became idle."""
    past = StoredPast(path, quiet_host())
    assert the_holding(past.watch(WATCHED)).state is State.IDLE
    past.end()
    return past


def the_holding(snapshot: Snapshot) -> Holding:
    ((holding,),) = [device.holdings for device in snapshot.devices]
    return holding


def restarted(path: Path, readings: Iterable[Reading]) -> list[Snapshot]:
    """Return what a new exporter publishes for its first readings."""

    async def run() -> list[Snapshot]:
        head, _, content = answer(path, {"ask": RESTORE}, "machine-1").partition(b"\n")
        tracker, timeline = HoldingTracker(idle_after=IDLE_AFTER, interval=1.0), Timeline()
        recorder = Recorder(tracker, timeline, IDLE_AFTER, 1.0)
        stored = StoredTracker(tracker, timeline, recorder, cast("Storage", _Sink()))
        known: dict[str, Any] = json.loads(head)
        assert known["found"]
        stored.set_earlier(known["header"], json.loads(content))
        return [stored.update(each) for each in readings]

    return asyncio.run(run())


def byte_seconds(snapshot: Snapshot) -> float:
    (device,) = snapshot.devices
    return sum(sum(each.byte_seconds.values()) for each in sure(device.owner_usage).owners)


@pytest.mark.parametrize("same_start", [True, False])
def test_a_reboot_forgets_pids(tmp_path: Path, same_start: bool) -> None:
    """After a reboot a pid is another process, even with the start time in ticks of one before the reboot."""
    past = stored_past(tmp_path)
    start = past.host.processes[0].start
    past.now += 20
    booted = Process(PID, {0: Fixed(GIB)}, begin=-900.0 if same_start else past.now - 5, user="ann")
    assert (booted.start == start) is same_start
    past.host.processes = [booted]
    snapshots = []
    for _ in range(30):
        snapshots.append(past.reading("boot-2"))
        past.now += 1.0
    for snapshot in restarted(tmp_path, snapshots):
        assert the_holding(snapshot).state is State.ACTIVE
        assert sure(snapshot.watched_since) >= snapshots[0].time
    assert byte_seconds(restarted(tmp_path, snapshots[:1])[0]) == 0, "counters begin again with the boot"


def test_the_past_before_a_reboot_stays_readable(tmp_path: Path) -> None:
    """A reboot begins a new segment; each moment is shown by what was known in its own boot."""
    past = stored_past(tmp_path)
    ended = past.now
    past = StoredPast(tmp_path, past.host)
    past.now = ended + 100
    past.host.processes = [Process(PID, {0: Fixed(2 * GIB)}, begin=past.now - 5, user="bob")]
    for _ in range(30):
        past.sample(past.reading("boot-2"))
    past.end()
    with open_past(tmp_path) as found:
        assert {each.header["boot"] for each in found.segments()} == {BOOT_ID, "boot-2"}
        times = [entry.time for entry in found.readings(0.0, float("inf"))]
        for at, held, state in ((times[WATCHED - 1], GIB, State.IDLE), (times[-1], 2 * GIB, State.ACTIVE)):
            holding = the_holding(compute(sure(found.find(at)), at).snapshot)
            assert (holding.held, holding.state) == (held, state)


def test_a_state_of_the_future_is_not_used(tmp_path: Path) -> None:
    """A machine that was set back to an earlier moment, with its boot id, starts without what came after."""
    past = stored_past(tmp_path)
    past.now = 30.0
    (after,) = restarted(tmp_path, [past.reading()])
    assert the_holding(after).state is State.ACTIVE


class _Broken(Recorder):
    """A recorder with a bug that shows at some time."""

    fails_at = float("inf")

    def record(self, reading: Reading) -> Iterator[tuple[bytes, bytes]]:
        """Fail from that time on."""
        if reading.monotonic >= self.fails_at:
            raise KeyError("bug")
        return super().record(reading)


def test_a_bug_of_the_recorder_is_said_and_counted() -> None:
    """Sampling goes on; the storage stays down, and each reading that it does not get counts as dropped."""
    host = quiet_host()

    async def run() -> tuple[StorageFigures, int]:
        tracker, timeline, sink = HoldingTracker(idle_after=IDLE_AFTER, interval=1.0), Timeline(), _Sink()
        recorder = _Broken(tracker, timeline, IDLE_AFTER, 1.0)
        recorder.fails_at = host.reading(0.0).monotonic + 2
        stored = StoredTracker(tracker, timeline, recorder, cast("Storage", sink))
        for second in range(5):
            assert stored.update(host.reading(float(second))).devices
        await asyncio.sleep(0)
        sink.health.record_sent(2)
        status = {"stored": 2, "dropped": 0, "written": 1, "newest": 1.0, "size": 1, "oldest": 1.0}
        sink.health.record_status({**status, "error": None, "house_error": None})
        assert stored.last_messages() == []
        return sink.health.figures(), sum(each[:1] == ADD for each, _ in sink.sent)

    figures, sent = asyncio.run(run())
    assert sent
    assert (figures.up, figures.dropped) == (False, 3)
    assert "KeyError('bug')" in sure(figures.last_error)[1]


@pytest.mark.parametrize(
    ("expected", "said"), [(True, "it is still starting"), (False, "it keeps no past; start it with")]
)
def test_an_exporter_that_starts_does_not_say_that_it_keeps_nothing(expected: bool, said: str) -> None:
    """Before its storage is open, an exporter that will have one asks for patience."""
    desk = PastDesk(expected=expected)
    caller = Caller(Peer(pid=1, start=0, uid=0, pidfd=-1), outside=True)
    with pytest.raises(ControlError, match=said):
        asyncio.run(desk.answer(At(1.0), caller))
    with pytest.raises(StorageError, match=said):
        asyncio.run(desk.answer_page({"ask": AT, "at": 1.0}))


class _Watched:
    """The health of a storage to which readings were sent, with clocks that a test sets."""

    def __init__(self, sent: int = 0) -> None:
        self.now = 1000.0
        self.health = StorageHealth(2**29, 604800.0, clock=lambda: self.now, monotonic=lambda: self.now)
        self.health.record_sent(sent)

    def figures(self) -> StorageFigures:
        """Return what the exporter would serve now."""
        return self.health.figures()

    def confirm(self, stored: int, dropped: int = 0, **more: Any) -> None:  # noqa: ANN401 fields of a status
        """Let the process that stores say what it has done."""
        status = {
            "stored": stored, "dropped": dropped, "written": 100 * stored,
            "newest": self.now if stored else None, "size": None, "oldest": None, "error": None,
            "house_error": None,
        }  # fmt: skip
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
    watched = _Watched(sent=1)
    names = "retention_limit_bytes retention_limit_seconds written_bytes_total dropped_samples_total"
    assert set(served(watched.figures())) == {*names.split(), "restarts_total"}
    watched.confirm(0, size=0)
    assert served(watched.figures())["size_bytes"] == 0
    assert watched.figures().up is None


def test_silence_is_not_health() -> None:
    """Who confirms no reading for 30 s does not store, whatever it said before or says else."""
    watched = _Watched(sent=1)
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
    watched = _Watched(sent=1)
    watched.confirm(1)
    for _ in range(10):
        watched.health.record_sent(4)
        watched.now += 4
        watched.confirm(1)
    assert watched.figures().up is False


def test_a_failing_disk_is_said_with_its_error() -> None:
    """While the disk fails the storage is down; old files that stay are an error, and no loss."""
    watched = _Watched(sent=3)
    watched.confirm(1)
    watched.confirm(1, dropped=2, error="No space left on device")
    assert (watched.figures().up, watched.figures().dropped) == (False, 2)
    watched.confirm(1, dropped=2)
    assert watched.figures().up is False, "nothing new is on the disk"
    watched.health.record_sent(1)
    watched.confirm(2, dropped=2)
    assert (watched.figures().up, watched.figures().dropped) == (True, 2)
    watched = _Watched(sent=2)
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


def test_counters_go_on_over_a_restart() -> None:
    """What was not confirmed is lost, and bytes, losses and times do not go back with a new process."""
    watched = _Watched(sent=10)
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
    watched = _Watched(sent=3)
    for _ in range(ends):
        watched.health.record_end("killed")
    assert watched.figures().dropped == 3


def test_a_size_that_is_not_known_any_more_is_absent() -> None:
    """An earlier size is not served as today's; after a bug in what records the storage stays down."""
    watched = _Watched()
    watched.confirm(0, size=7, oldest=5.0)
    assert (watched.figures().size, watched.figures().oldest) == (7, 5.0)
    watched.confirm(0)
    assert (watched.figures().size, watched.figures().oldest) == (None, None)
    watched = _Watched(sent=2)
    watched.confirm(1)
    watched.health.record_given_up("a bug")
    watched.confirm(2, house_error="old files stay")
    assert (watched.figures().up, watched.figures().last_error) == (False, (watched.now, "a bug"))
    watched.health.record_end("killed")
    watched.health.record_restart()
    watched.confirm(1)
    assert watched.figures().up is False
