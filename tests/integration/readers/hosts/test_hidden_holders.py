"""The search for processes that have a device file open and are not listed."""

import mmap
import os
import signal
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path

import pytest

from tests.support.players.stage import Player, Stage, status
from tests.support.procs import NOBODY, FakeProc
from tests.support.stranger import as_user
from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import DeviceReading, HiddenHolder, ProcessEntry
from vramledger.readers.collector import Context
from vramledger.readers.hosts import hidden_holders
from vramledger.readers.hosts.driver_watch import read_open_device_files
from vramledger.readers.hosts.hidden_holders import HiddenSearch
from vramledger.readers.hosts.host import Host

OpenFiles = Callable[..., Player]


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Return a directory with device files and the driver's libraries."""
    place = tmp_path / "dev"
    place.mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "libcuda.so.580.1", "libnvidia-ml.so.1"):
        (place / name).write_bytes(bytes(mmap.PAGESIZE))
    return place


@pytest.fixture
def open_files(devices: Path, stage: Stage) -> OpenFiles:
    """Give a function that starts a process with these files open, or mapped where the name ends in ``+``."""

    def start(*names: str) -> Player:
        orders = ("map_file" if name.endswith("+") else "open_file" for name in names)
        return stage.start(*zip(orders, (str(devices / name.rstrip("+")) for name in names), strict=True))

    return start


def _complete(search: HiddenSearch, listed: set[int] | None = None) -> None:
    def complete() -> bool:
        search.search(listed or set(), 1.0)
        return search.complete

    wait_until(complete, "a complete search")


def _finish(search: HiddenSearch, listed: set[int] | None = None) -> tuple[HiddenHolder, ...]:
    _complete(search, listed)
    return sure(search.result)


def test_hidden_holders_are_found_and_told_apart(host: Host, devices: Path, open_files: OpenFiles) -> None:
    """CUDA programs, monitors and others with a device open are found; control files do not count."""
    libraries = ("libnvidia-ml.so.1+", "libcuda.so.580.1+")
    cuda = open_files("nvidia1+", "nvidia0", "nvidia1", "nvidiactl", *libraries)
    monitor = open_files("nvidia0", "nvidiactl+", *libraries)
    other = open_files("nvidia1")
    open_files("nvidiactl+", "nvidia-uvm", "libcuda.so.580.1+")
    found = _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"))
    assert [(each.pid, each.kind, each.minors) for each in found] == sorted(
        [(cuda.pid, "cuda", (0, 1)), (monitor.pid, "monitor", (0,)), (other.pid, "unknown", (1,))]
    )
    for each in found:
        assert (each.start, each.command) == (sure(host.row(each.pid)).start, "player.py")


def test_a_forked_worker_has_its_parents_files(host: Host, devices: Path, open_files: OpenFiles) -> None:
    """While NVML lists the parent, a child with the device open does not count as a hidden holder."""
    holder = open_files("nvidia0+")
    (found,) = _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"), {os.getpid()})
    assert (found.pid, found.kind) == (holder.pid, "inherited")


@pytest.mark.parametrize("end", ["zombie", "gone"])
def test_a_child_of_an_ended_one_counts(host: Host, devices: Path, open_files: OpenFiles, end: str) -> None:
    """A child counts as soon as its parent has ended, reaped or not, although NVML still lists the parent."""
    parent = open_files("nvidia0+")
    heir = parent.fork()
    search = HiddenSearch(host, (), devices=f"{devices}/nvidia", clock=lambda: 0.0)  # no other round comes
    assert [each.kind for each in _finish(search, {parent.pid})] == ["inherited"]
    parent.signal(signal.SIGKILL)
    if end == "gone":
        parent.end()
    wait_until(lambda: status(parent.pid) == end, "its end")

    def named() -> bool:
        search.search({parent.pid}, 1.0)
        return [(each.pid, each.kind) for each in search.result or ()] == [(heir.pid, "cuda")]

    wait_until(named, "the heir, named")


def test_heirs_of_a_killed_holder_are_found_at_once(host: Host, devices: Path, open_files: OpenFiles) -> None:
    """A child that nobody knew is found once NVML lists its ended parent in two samples."""
    parent = open_files("nvidia0+")
    search = HiddenSearch(host, (), devices=f"{devices}/nvidia", clock=lambda: 0.0)
    listed = (DeviceReading(index=0, uuid="GPU-0", processes=(ProcessEntry(parent.pid, 1, "C"),)),)

    def sample() -> list[tuple[int, str]]:
        context = Context(devices=listed, parts={"rows": host.rows([parent.pid])[0]})
        search.read(context)
        if search.work_at <= 0.0:
            search.work_between(context)
        return [(each.pid, each.kind) for each in search.result or ()]

    wait_until(lambda: sample() == [] and search.work_at > 0.0, "a complete search")
    heir = parent.fork()
    parent.signal(signal.SIGKILL)
    wait_until(lambda: status(parent.pid) == "zombie", "its end")
    assert sample() == []
    wait_until(lambda: sample() == [(heir.pid, "cuda")], "the heir")


def test_a_removed_device_file_is_still_held(host: Host, devices: Path, open_files: OpenFiles) -> None:
    """After a reload of the driver, processes still have its old device files open."""
    holder = open_files("nvidia0")
    (devices / "nvidia0").unlink()
    assert [each.pid for each in _finish(HiddenSearch(host, (), devices=f"{devices}/nvidia"))] == [holder.pid]


def test_listed_and_own_processes_are_not_hidden(host: Host, devices: Path, open_files: OpenFiles) -> None:
    """A process that NVML lists is not hidden, from its listing on; neither are our own processes."""
    listed, own, later, ending = (open_files("nvidia0") for _ in range(4))
    search = HiddenSearch(host, {own.pid}, devices=f"{devices}/nvidia")
    assert {each.pid for each in _finish(search, {listed.pid})} == {later.pid, ending.pid}
    search.search({listed.pid, later.pid}, 1.0)
    assert {each.pid for each in search.result or ()} == {ending.pid}
    ending.end()
    search.search({listed.pid, later.pid}, 1.0)
    assert search.result == ()


def test_a_step_keeps_its_budget_and_a_round_its_pause(proc: FakeProc) -> None:
    """A round takes several steps; its result counts when it is complete; the next round waits."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.001  # as if every process took a millisecond
        return now

    for pid in range(100, 200):
        proc.add(pid)
        proc.hold(pid, *["/dev/nvidia3"] * (pid == 199))
    holder = proc.root / "199/fd/0"
    search = HiddenSearch(Host(proc.root), (), round_interval=30.0, clock=clock)
    steps = 0

    def found() -> bool:
        nonlocal steps
        search.search((), 0.010)
        steps += 1
        return search.result is not None

    wait_until(found, "the holder found")
    assert steps >= 8
    assert [each.minors for each in sure(search.result)] == [(3,)]
    holder.unlink()
    (proc.root / "150/fd/7").symlink_to("/dev/nvidia1")
    search.search((), 10.0)
    assert [each.pid for each in sure(search.result)] == [199]
    now += 30.0

    def found_again() -> bool:
        search.search((), 10.0)
        return [each.pid for each in search.result or ()] == [150]

    wait_until(found_again, "the holder found again")


def test_a_hanging_look_is_given_up(proc: FakeProc) -> None:
    """A holder whose memory cannot be read is reported as unknown, and the round ends."""
    now = 0.0
    proc.add(42, comm=b"stuck")
    proc.hold(42, "/dev/nvidia0")
    path = proc.hang(42, "maps")
    search = HiddenSearch(Host(proc.root), (), clock=lambda: now)

    def finished() -> bool:
        nonlocal now
        now += 1.0
        search.search((), 1.0)
        return search.result is not None

    wait_until(finished, "what was asked for")
    assert search.result == (HiddenHolder(42, 500, "unknown", "stuck", "root", (0,)),)
    assert search.unreadable == 1
    path.write_bytes(b"")  # let the thread end


@pytest.mark.parametrize("cap", [hidden_holders._MAPS_CAP, 64 * 1024])  # noqa: SLF001 a small one is quick
def test_half_the_mappings_prove_nothing(proc: FakeProc, monkeypatch: pytest.MonkeyPatch, cap: int) -> None:
    """A program that maps so much that its device is not reached is not taken for a monitor."""
    library = b"7f00-7f01 r-xp 0 00:00 1 /usr/lib/libnvidia-ml.so.1\n"
    device = b"7f00-7f01 rw-s 0 00:06 1 /dev/nvidia0\n"
    proc.add(42, maps=library + b"7f00-7f01 r--p 0 00:00 0\n" * 4000 + device)
    proc.hold(42, "/dev/nvidia0")
    monkeypatch.setattr(hidden_holders, "_MAPS_CAP", cap)
    search = HiddenSearch(Host(proc.root), ())
    (found,) = _finish(search)
    assert (found.kind, search.unreadable) == (("cuda", 0) if cap > 64 * 1024 else ("unknown", 1))


@pytest.mark.usefixtures("as_nobody")
def test_not_being_allowed_to_look_is_not_nobody(host: Host) -> None:
    """Without privileges the search reports how many processes it could not read, not "none hidden"."""
    search = HiddenSearch(host, ())
    _complete(search)
    assert (search.result, search.unreadable > 1) == (None, True)


def test_a_proc_that_hides_processes_is_not_nobody(hidden_proc: Path) -> None:
    """Where proc hides other users' processes (hidepid), it is not known who holds a device."""
    search = HiddenSearch(Host(hidden_proc), ())
    with as_user(NOBODY):
        _complete(search)
    assert (search.result, search.unreadable > 0) == (None, True)


def test_what_is_found_counts_though_not_all_may_be_looked_into(proc: FakeProc) -> None:
    """A holder that was seen is known; when it has ended, nothing is known about the others."""
    proc.add(42)
    proc.hold(42, "/dev/nvidia0")
    (proc.root / "1").rename(proc.root / "init")  # not shown
    search = HiddenSearch(Host(proc.root), ())
    assert [each.pid for each in _finish(search)] == [42]
    proc.stat(42).unlink()
    search.search((), 1.0)
    assert (search.result, search.unreadable) == (None, 1)


CROWDED = hidden_holders._LINKS_MAX + 100  # noqa: SLF001
"""Files of a process: more than are looked at."""


@pytest.mark.parametrize("maps", [b"", b"7f00-7f01 rw-s 0 00:06 1 /dev/nvidia3\n"])
def test_a_crowd_of_files_hides_nobody(proc: FakeProc, monkeypatch: pytest.MonkeyPatch, maps: bytes) -> None:
    """Of a process with many files the mappings tell whether it has a context, and no file costs."""
    proc.add(42, maps=b"7f00-7f01 r-xp 0 00:00 1 /usr/lib/libc.so.6\n" + maps)
    proc.hold(42, *["/dev/null"] * CROWDED)
    targets, real = chain(["/dev/null"] * (CROWDED - 100), repeat("/dev/nvidia3")), os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: next(targets) if "/42/fd/" in path else real(path))
    search = HiddenSearch(Host(proc.root), ())
    found = _finish(search)
    assert [(each.pid, each.kind, each.minors) for each in found] == ([(42, "cuda", (3,))] if maps else [])
    assert search.unreadable == 0


def test_a_crowd_of_unread_mappings_is_somebody(proc: FakeProc, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where neither its files nor its mappings are all read, it is not known whether it has a context."""
    proc.add(42, maps=b"7f00-7f01 r--p 0 00:00 0\n" * 4000)
    proc.hold(42, *["/dev/null"] * CROWDED)
    monkeypatch.setattr(hidden_holders, "_MAPS_CAP", 64 * 1024)
    search = HiddenSearch(Host(proc.root), ())
    _complete(search)
    assert (search.result, search.unreadable) == (None, 1)


def test_a_round_without_an_end_is_not_nobody(proc: FakeProc) -> None:
    """A search that takes too long says that nothing is known, and forgets what an earlier one has found."""
    now = 0.0
    proc.add(42)
    proc.hold(42, "/dev/nvidia0")
    search = HiddenSearch(Host(proc.root), (), clock=lambda: now)
    _complete(search)
    for pid in range(1000, 1200):
        proc.add(pid)
        proc.hold(pid)
    now = 31.0
    seen = []
    for _ in range(12):
        search.search((), 0.0)  # one process each time
        seen.append(search.result)
        now += 29.0
    assert seen[0] is not None
    assert (seen[-1], search.complete, search.health[0]) == (None, False, False)


def test_what_descendants_have_open_is_found(tmp_path: Path, stage: Stage) -> None:
    """A file that a grandchild or this process has open is found with its pid, until it is closed."""
    device = tmp_path / "nvidia0"
    device.touch()
    prefix = str(tmp_path / "nvidia")
    assert read_open_device_files(prefix) == {}
    with device.open():
        assert read_open_device_files(prefix) == {os.getpid(): [str(device)]}
    child = stage.start().start(("open_file", str(device)))
    assert read_open_device_files(prefix) == {child.pid: [str(device)]}
    child.end()
    assert read_open_device_files(prefix) == {}
