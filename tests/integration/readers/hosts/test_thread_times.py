"""Which threads of real programs ran between two looks: still ones, working ones, and those that pretend."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.accounting.work.thread_times import HELPER_WAKE
from vramledger.model.reading import DeviceReading, ProcessEntry, ProcessRow, ThreadTimes
from vramledger.readers.hosts import thread_times
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.stat import read_row
from vramledger.readers.hosts.thread_times import DRIVER_THREAD, ThreadTimesReader

DRIVER = DRIVER_THREAD.decode().strip()

PROGRAM = """
import os, sys, threading
def serve(told, answers, name=""):
    if name:
        with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
            file.write(name)
    os.write(answers, b".")
    while command := os.read(told, 1):
        if command == b"w":
            sum(range(500_000))
        elif command == b"t":
            thread = threading.Thread(target=sum, args=(range(1000),))
            thread.start()
            thread.join()
        elif command == b"k":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif command == b"x":
            os.execv(sys.executable, [sys.executable, "-c", "import os; os.write(1, b'.'); os.read(0, 1)"])
        os.write(answers, b".")
for spec in sys.argv[1:]:
    told, answers, name = spec.split(":")
    threading.Thread(target=serve, args=(int(told), int(answers), name), daemon=True).start()
serve(0, 1)
os._exit(0)
"""


class CommandedProgram:
    """A real program whose threads do something only on command."""

    def __init__(self, *names: str) -> None:
        """Start it with helper threads of these names."""
        pipes = [(os.pipe(), os.pipe()) for _ in names]
        inside = [(told[0], answers[1]) for told, answers in pipes]
        self.helpers = [(told[1], answers[0]) for told, answers in pipes]
        specs = [f"{told}:{answers}:{name}" for (told, answers), name in zip(inside, names, strict=True)]
        command, numbers = [sys.executable, "-c", PROGRAM, *specs], [each for pair in inside for each in pair]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=numbers)
        for number in numbers:
            os.close(number)
        self.main = (sure(self.process.stdin).fileno(), sure(self.process.stdout).fileno())
        self.pid = self.process.pid
        for _, answers in (self.main, *self.helpers):
            os.read(answers, 1)
        self.rest()

    @property
    def row(self) -> ProcessRow:
        return sure(read_row("/proc", self.pid))

    def tell(self, thread: tuple[int, int], command: str, times: int = 1) -> None:
        """Let a thread do something this often, and wait until all threads sleep again."""
        for _ in range(times):
            os.write(thread[0], command.encode())
            os.read(thread[1], 1)
            self.rest()

    def rest(self) -> None:
        """Wait until every thread sleeps: one that has answered still runs for a moment."""
        wait_until(lambda: set(self._states()) == {"S"}, "all threads sleep")

    def _states(self) -> Iterator[str]:
        for stat in Path(f"/proc/{self.pid}/task").glob("*/stat"):
            with suppress(FileNotFoundError):  # the thread has ended
                yield stat.read_text().rpartition(")")[2].split()[0]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()
        for pair in self.helpers:
            for number in pair:
                os.close(number)


Order = tuple[tuple[int, int], str, int]
"""A thread of a program, its command, and how often."""


class Looking:
    """A program that was looked at once; between two looks pass as many seconds as the test says."""

    def __init__(self, program: CommandedProgram, root: str = "/proc") -> None:
        self.now, self.program = 1000.0, program
        self.reader = ThreadTimesReader(root, Host(Path("/proc")).cpu_seconds, clock=lambda: self.now)
        assert self.look() is None, "one look alone says nothing"

    def look(self, *, after: float = 30.0, gpus: int = 1) -> ThreadTimes | None:
        """Look at the program; return what ran since the look before, None if there was none."""
        self.now += after
        entry = ProcessEntry(self.program.pid, 2**30, "C")
        devices = [DeviceReading(number, f"GPU-{number}", processes=(entry,)) for number in range(gpus)]
        self.reader.update(devices, [self.program.row])
        self.reader.search()
        found = self.reader.update(devices, [self.program.row])
        return found[0] if found else None

    def told(self, *orders: Order, gpus: int = 1) -> ThreadTimes:
        """Give the program orders, and return what ran since the look before."""
        for order in orders:
            self.program.tell(*order)
        return sure(self.look(gpus=gpus))


Start = Callable[..., CommandedProgram]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as ending:

        def begin(*names: str) -> CommandedProgram:
            program = CommandedProgram(*names)
            ending.callback(program.end)
            return program

        yield begin


def test_program_that_does_nothing_is_still(start: Start) -> None:
    """No thread of it has run, and that is known of all the time between the looks."""
    found = Looking(start("", "pool")).told()
    assert (found.still, found.since, found.until) == (True, 1030.0, 1060.0)


def test_any_thread_that_runs_is_told_from_the_main_one(start: Start) -> None:
    """The main thread and the others are counted apart, with their CPU time."""
    program = start("")
    looking = Looking(program)
    by_main = looking.told((program.main, ".", 3))
    by_other = [looking.told((program.helpers[0], "w", 2)) for _ in range(5)]
    assert by_main.main_runs >= 3
    for each in by_other:
        assert (by_main.other_runs, each.main_runs, each.still, each.other_runs >= 2) == (0, 0, False, True)
    assert max(sure(each.longest) for each in by_other) > HELPER_WAKE, "work is more than a helper's wake"


def test_thread_that_lived_between_two_looks_does_not_hide(start: Start) -> None:
    """Whoever started it had to run; one that stays is counted as new."""
    program = start("")
    looking = Looking(program)
    for command, new in (("t", 0), ("k", 1)):
        found = looking.told((program.helpers[0], command, 1))
        assert (found.still, found.changed) == (False, new)


def test_program_that_replaces_itself_has_run(start: Start) -> None:
    """``exec`` keeps the pid and the start time; the other threads end, and the main one ran."""
    program = start("", "pool")
    found = Looking(program).told((program.main, "x", 1))
    assert (found.still, found.changed, found.main_runs > 0) == (False, 2, True)


def test_a_thread_like_the_drivers_does_not_count(start: Start) -> None:
    """In a program that does nothing, the driver's thread goes on ten times a second."""
    program = start("", DRIVER)
    looking, ticks = Looking(program), (program.helpers[1], ".", 300)
    assert looking.told(ticks).still
    worked = looking.told(ticks, (program.helpers[0], ".", 1))
    assert (worked.still, worked.other_runs >= 1, worked.python) == (False, True, True)


@pytest.mark.parametrize(("times", "order"), [(1, "."), (30, "w"), (600, ".")], ids=["rare", "long", "often"])
def test_the_drivers_name_excuses_none(start: Start, times: int, order: str) -> None:
    """A worker of that name that runs seldom, long or often counts as any other thread."""
    program = start(DRIVER)
    found = Looking(program).told((program.helpers[0], order, times))
    assert (found.still, found.other_runs >= times) == (False, True)


def test_one_gpu_excuses_one_thread(start: Start) -> None:
    """Beside the driver's own thread, a worker of its name and rhythm counts; on two GPUs there are two."""
    program = start(DRIVER, DRIVER)
    looking, ticks = Looking(program), [(helper, ".", 300) for helper in program.helpers]
    assert not looking.told(*ticks).still
    assert looking.told(*ticks, gpus=2).still


def test_worker_that_wakes_up_is_looked_at_at_once(start: Start) -> None:
    """A main thread that slept and runs is seen in the next sample, not at the next look."""
    program = start()
    looking = Looking(program)
    assert looking.told().still
    assert looking.look(after=1.0) is None
    program.tell(program.main, ".")
    assert sure(looking.look(after=1.0)).main_runs > 0


def copy_of(program: CommandedProgram, root: Path) -> None:
    """Copy what the reader reads of a program into a proc file system of our own."""
    shutil.rmtree(root / str(program.pid), ignore_errors=True)
    for task in Path(f"/proc/{program.pid}/task").iterdir():
        place = root / str(program.pid) / "task" / task.name
        place.mkdir(parents=True)
        for name in ("schedstat", "status", "comm", "stat"):
            (place / name).write_bytes((task / name).read_bytes())


@pytest.mark.parametrize("how", ["missing", "zeros"])
def test_context_switches_for_schedstat(start: Start, tmp_path: Path, how: str) -> None:
    """A kernel without statistics has no such file, or writes zeros into it: they are not quiet."""
    program = start(DRIVER, "")

    def copy() -> None:
        copy_of(program, tmp_path)
        for file in tmp_path.glob("*/task/*/schedstat"):
            file.unlink() if how == "missing" else file.write_text("0 0 0\n")

    copy()
    looking, seen = Looking(program, str(tmp_path)), []
    for order in ((program.main, ".", 0), (program.helpers[0], ".", 300), (program.helpers[1], ".", 1)):
        program.tell(*order)
        copy()
        seen.append(looking.told())
    assert [each.still for each in seen] == [True, True, False]
    assert (seen[2].other_runs >= 1, seen[2].other_cpu) == (True, None)


def test_what_may_not_be_read_is_not_known(start: Start, tmp_path: Path) -> None:
    """A process one thread of which cannot be read is never called still."""
    program = start("")
    copy_of(program, tmp_path)
    looking = Looking(program, str(tmp_path))
    thread = next(each for each in tmp_path.glob("*/task/*") if each.name != str(program.pid))
    (thread / "schedstat").write_text("garbage")
    unreadable = looking.told()
    assert (unreadable.complete, unreadable.still, looking.reader.unreadable) == (False, False, 1)
    copy_of(program, tmp_path)
    assert looking.look() is None, "after that, a first look again says nothing"


def test_many_threads_take_a_while(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with many threads takes some samples to look at; of one with far more nothing is known."""
    monkeypatch.setattr(thread_times, "THREADS_MAX", 1000)
    program = start("")
    copy_of(program, tmp_path)
    tasks = tmp_path / str(program.pid) / "task"
    for number in range(500):
        place = tasks / str(10_000_000 + number)
        place.mkdir()
        (place / "schedstat").write_text("1000000 0 5\n")
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return 1000.0 + reads * 4e-5

    reader = ThreadTimesReader(str(tmp_path), lambda _: None, clock=clock)
    device = DeviceReading(0, "GPU-0", processes=(ProcessEntry(program.pid, 2**30, "C"),))
    turns = 0
    while reader.update([device], [program.row]) == () and turns < 1000:
        begun = clock()
        reader.search()
        assert clock() - begun < 0.004
        turns += 1
        reads += 750_000 if turns % 20 == 0 else 0
    assert 10 < turns < 1000
    ticking = Looking(program, str(tmp_path))
    for number in range(1000):
        (tasks / str(20_000_000 + number)).mkdir()
    assert not ticking.told().complete
