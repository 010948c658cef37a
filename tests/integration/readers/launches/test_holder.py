"""What a program hands to its GPUs is counted, or it is said why not: real uprobes on a stand-in libcuda."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.launches.program import (
    ALIAS,
    FUNCTIONS,
    LaunchingProgram,
    build_library,
    launching_program,
)
from tests.support.requirements import require_namespaces, require_root, require_tool, require_uprobes
from tests.support.waiting import wait_until
from vramledger.model.reading import LaunchCount
from vramledger.readers.launches.counter_pool import CounterPool
from vramledger.readers.launches.elf import find_functions, submits_work
from vramledger.readers.launches.holder import HolderCounter

pytestmark = pytest.mark.waits

WORK = 5
"""How many of the stand-in's functions hand over work, each counted once in each thread."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stand-in for libcuda, on a machine that lets us count."""
    require_uprobes()
    return build_library(require_tool("cc"), tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="module")
def pool() -> CounterPool:
    """Return the counters of all holders."""
    return CounterPool(1000)


@pytest.fixture
def program(library: Path) -> Iterator[LaunchingProgram]:
    """Run a program of which one thread polls, as in a notebook."""
    with launching_program(library) as running:
        running.tell("poll", 0.01)
        yield running


Count = Callable[[LaunchingProgram], HolderCounter]


@pytest.fixture
def count(pool: CounterPool) -> Iterator[Count]:
    """Return what begins to count a program; at the end of the test all of it is closed."""
    with ExitStack() as stack:

        def begin(program: LaunchingProgram) -> HolderCounter:
            counter = HolderCounter("/proc", (program.pid, program.start), pool)
            stack.callback(counter.close)
            return counter

        yield begin


def look_until(counter: HolderCounter, reached: Callable[[LaunchCount], bool]) -> LaunchCount:
    """Look until something is seen."""
    results = []

    def look() -> bool:
        results.append(counter.update())
        return reached(results[-1])

    wait_until(look, "the count")
    return results[-1]


def settle(counter: HolderCounter, program: LaunchingProgram, threads: int = 2) -> LaunchCount:
    """Look until the threads that run, the main one and the one that polls, are counted and quiet."""
    look_until(counter, lambda _: counter.counters >= (threads - 1) * WORK)
    program.tell("call", "cuCtxGetCurrent", 1)
    return look_until(counter, lambda seen: counter.counters == threads * WORK and (seen.quiet or 0) > 0.05)


def code_of(program: LaunchingProgram, library: Path, name: str) -> bytes:
    """Return the first byte of a function in the program's memory: a breakpoint changes it."""
    with library.open("rb") as file:
        offset = find_functions(file.fileno(), lambda each: each == name)[name]
    for line in Path(f"/proc/{program.pid}/maps").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[-1] == str(library) and "x" in words[1]:
            begin, _, _ = words[0].partition("-")
            with Path(f"/proc/{program.pid}/mem").open("rb", buffering=0) as memory:
                memory.seek(int(begin, 16) + offset - int(words[2], 16))
                return memory.read(1)
    message = "the program does not map the library"
    raise AssertionError(message)


@pytest.mark.parametrize("name", [*(each for each in FUNCTIONS if submits_work(each)), ALIAS])
def test_each_call_is_counted(program: LaunchingProgram, count: Count, name: str) -> None:
    """Every launch, copy and memset is counted, and a second name of a function counts once."""
    counter = count(program)
    settle(counter, program)

    program.tell("call", name, 3)

    assert counter.update() == LaunchCount(program.pid, program.start, None, calls=3)


def test_the_first_call_ends_the_counting(
    program: LaunchingProgram, count: Count, pool: CounterPool, library: Path
) -> None:
    """After the first call the program has no breakpoint any more, and what was counted stays known."""
    before = code_of(program, library, "cuLaunchKernel")
    counter = count(program)
    settle(counter, program)
    assert code_of(program, library, "cuLaunchKernel") != before

    program.tell("call", "cuLaunchKernel", 1)
    first = counter.update()
    program.tell("call", "cuLaunchKernel", 10)

    assert (first.calls, counter.update().calls, counter.counters) == (1, 1, 0)
    assert pool.wait(60)
    assert code_of(program, library, "cuLaunchKernel") == before


def test_the_called_function_is_free_first(
    program: LaunchingProgram, count: Count, pool: CounterPool, library: Path
) -> None:
    """The breakpoint that the program runs into goes before the others: each takes up to 0.1 s."""
    before = code_of(program, library, "cuMemsetD8Async")
    other = code_of(program, library, "cuLaunchKernel")
    counter = count(program)
    settle(counter, program)

    program.tell("call", "cuMemsetD8Async", 1)
    counter.update()
    wait_until(lambda: code_of(program, library, "cuMemsetD8Async") == before, "the function free")

    assert code_of(program, library, "cuLaunchKernel") != other
    assert pool.wait(60)


def test_other_calls_are_not_work(program: LaunchingProgram, count: Count) -> None:
    """A program that only asks and waits stays quiet."""
    counter = count(program)
    before = settle(counter, program)

    program.tell("call", "cuCtxGetCurrent", 5)
    program.tell("call", "cuStreamSynchronize", 5)
    after = counter.update()

    assert after.calls == 0
    assert (after.quiet or 0) > (before.quiet or 0)


def thread_states(pid: int) -> list[str]:
    """Return the kernel's letter for the state of each thread, the first one first."""
    threads = sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))
    stats = [(thread / "stat").read_text() for thread in threads]
    return [stat.rpartition(")")[2].split()[0] for stat in stats]


def test_sleeping_program_has_no_counter(library: Path, count: Count) -> None:
    """A program whose threads all sleep is quiet without a single breakpoint."""
    with launching_program(library) as program:
        program.tell("start", 50)
        before = code_of(program, library, "cuLaunchKernel")
        wait_until(lambda: thread_states(program.pid) == ["S"] * 51, "its sleep")
        counter = count(program)

        look_until(counter, lambda seen: (seen.quiet or 0) > 0.1)

        assert counter.counters == 0
        assert code_of(program, library, "cuLaunchKernel") == before


def test_thread_of_the_driver_needs_no_counter(library: Path, count: Count) -> None:
    """The driver's own thread, which wakes all the time in every program, does not need a counter."""
    with launching_program(library) as program:
        program.tell("poll", 0.01, "cuda-EvtHandlr")
        threads = Path(f"/proc/{program.pid}/task")
        wait_until(
            lambda: "cuda-EvtHandlr\n" in {(each / "comm").read_text() for each in threads.iterdir()},
            "its name",
        )
        wait_until(lambda: thread_states(program.pid)[0] == "S", "its sleep")
        counter = count(program)

        look_until(counter, lambda seen: (seen.quiet or 0) > 0.3)

        assert counter.counters == 0


def test_thread_that_wakes_is_not_quiet(library: Path, count: Count) -> None:
    """A thread without a counter that wakes, launches and sleeps again restarts the quiet time."""
    with launching_program(library) as program:
        for _ in range(3):
            program.tell("sleeper", "cuLaunchKernel")
        counter = count(program)
        before = look_until(counter, lambda seen: (seen.quiet or 0) > 0.2)

        program.tell("wake")
        after = counter.update()

        # On a busy machine a look may have met it before it slept; then it has a counter, which counts.
        assert after.calls or after.quiet is None or after.quiet < (before.quiet or 0)


def test_thread_between_two_looks_is_not_quiet(program: LaunchingProgram, count: Count) -> None:
    """A thread that is started, launches and ends between two looks begins the quiet time again."""
    counter = count(program)
    before = settle(counter, program)

    program.tell("short", "cuLaunchKernel")
    after = counter.update()

    assert after.calls == 0
    assert after.quiet is None or after.quiet < (before.quiet or 0)


def test_started_program_does_not_interrupt(program: LaunchingProgram, count: Count) -> None:
    """Another program that is started does not make the quiet time begin again: it is not this holder."""
    counter = count(program)
    before = settle(counter, program)

    program.tell("child")

    assert (counter.update().quiet or 0) > (before.quiet or 0)


def test_program_can_do_everything(program: LaunchingProgram, count: Count) -> None:
    """A program whose calls are counted can start threads and programs, and its new threads are counted."""
    counter = count(program)
    settle(counter, program)

    program.tell("start", 20)
    program.tell("child")
    program.tell("poll", 0.01)
    look_until(counter, lambda seen: counter.counters == 3 * WORK and (seen.quiet or 0) > 0)
    program.tell("short", "cuCtxGetCurrent")

    assert counter.update().problem == ""


def test_forked_child_runs_on(
    program: LaunchingProgram, count: Count, pool: CounterPool, library: Path
) -> None:
    """A child with a copy of the program's memory can call what is counted, then and afterwards."""
    before = code_of(program, library, "cuLaunchKernel")
    counter = count(program)
    settle(counter, program)

    program.tell("fork", "cuLaunchKernel")
    counter.update()
    counter.end()
    assert pool.wait(60)

    assert program.tell("end_fork") == ["0"]
    assert code_of(program, library, "cuLaunchKernel") == before


def test_holder_that_was_ended_stays_so(program: LaunchingProgram, count: Count) -> None:
    """Once the counting of a holder was ended, a look that comes late attaches to nothing."""
    counter = count(program)
    settle(counter, program)
    counter.end()

    assert [(counter.update().quiet, counter.counters) for _ in range(3)] == [(None, 0)] * 3


def test_exec_begins_again(program: LaunchingProgram, count: Count, library: Path) -> None:
    """A program that replaces itself is counted again: its process and its start time stay the same."""
    counter = count(program)
    settle(counter, program)
    before = look_until(counter, lambda seen: (seen.quiet or 0) > 0.5)

    program.tell("execute", library, answer="ready")
    after = counter.update()
    program.tell("poll", 0.01)
    settle(counter, program)
    program.tell("call", "cuGraphLaunch", 2)

    assert after.quiet is None or after.quiet < (before.quiet or 0)
    assert counter.update().calls == 2


def test_second_library_is_counted(
    program: LaunchingProgram, count: Count, library: Path, tmp_path: Path
) -> None:
    """A second libcuda that is loaded later is counted too."""
    second = tmp_path / "libcuda.so.580.0"
    shutil.copy(library, second)
    counter = count(program)
    settle(counter, program)

    program.tell("load", second)
    look_until(counter, lambda _: counter.counters >= 2 * WORK)
    program.tell("call", "cuCtxGetCurrent", 1)
    look_until(counter, lambda seen: counter.counters == 4 * WORK and (seen.quiet or 0) > 0)
    program.tell("call", "cuLaunchKernel", 6)

    assert counter.update().calls == 6


def test_driver_without_some_functions(pool: CounterPool, tmp_path: Path) -> None:
    """An older libcuda that lacks functions is counted by those that it has."""
    require_uprobes()
    library = build_library(require_tool("cc"), tmp_path, ("cuLaunchKernel", "cuInit"))
    with launching_program(library) as program:
        program.tell("poll", 0.01)
        counter = HolderCounter("/proc", (program.pid, program.start), pool)
        look_until(counter, lambda seen: counter.counters > 0 and (seen.quiet or 0) > 0)

        program.tell("call", "cuInit", 1)
        look_until(counter, lambda seen: counter.counters == 2 and (seen.quiet or 0) > 0)
        program.tell("call", "cuLaunchKernel", 4)

        assert counter.update().calls == 4


def test_library_without_functions_is_a_problem(pool: CounterPool, tmp_path: Path) -> None:
    """A libcuda that has none of the functions is never a quiet one."""
    require_uprobes()
    library = build_library(require_tool("cc"), tmp_path, ("cuInit",))
    with launching_program(library) as program:
        program.tell("poll", 0.01)
        counter = HolderCounter("/proc", (program.pid, program.start), pool)

        seen = look_until(counter, lambda seen: bool(seen.problem))

        assert "has none of the functions" in seen.problem
        assert seen.quiet is None


def test_replaced_library_is_a_problem(count: Count, library: Path, tmp_path: Path) -> None:
    """Where the library was replaced while the program runs, as by an upgrade, that is said."""
    copy = tmp_path / "libcuda.so.1"
    shutil.copy(library, copy)
    with launching_program(copy) as program:
        program.tell("poll", 0.01)
        copy.unlink()
        shutil.copy(library, copy)
        counter = count(program)

        seen = look_until(counter, lambda seen: bool(seen.problem))

        assert "was replaced after it was started" in seen.problem
        assert (seen.quiet, counter.counters) == (None, 0)


def test_library_behind_another_mount_is_a_problem(library: Path, count: Count, tmp_path: Path) -> None:
    """Where the path leads to another file than the program has mapped, it is not called quiet."""
    require_namespaces()
    require_root()
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    shutil.copy(library, tmp_path / "old/libcuda.so.1")
    shutil.copy(library, tmp_path / "new/libcuda.so.1")
    with launching_program(tmp_path / "old/libcuda.so.1", "unshare", "--mount") as program:
        program.tell("poll", 0.01)
        enter = ["nsenter", "--mount", f"--target={program.pid}"]
        subprocess.run([*enter, "mount", "--bind", tmp_path / "new", tmp_path / "old"], check=True)
        counter = count(program)

        seen = look_until(counter, lambda seen: bool(seen.problem))

        assert "did not reach its memory" in seen.problem
        assert seen.quiet is None


def test_library_in_a_container(library: Path, count: Count, tmp_path: Path) -> None:
    """A library that only the program's own root file system has is counted."""
    require_namespaces()
    require_root()
    inside = tmp_path / "inside"
    inside.mkdir()
    script = f'mount -t tmpfs none {inside} && cp {library} {inside}/libcuda.so.1 && exec "$@"'
    wrapper = ["unshare", "--mount", "sh", "-c", script, "sh"]
    with launching_program(inside / "libcuda.so.1", *wrapper) as program:
        assert not (inside / "libcuda.so.1").exists()
        program.tell("poll", 0.01)
        counter = count(program)
        settle(counter, program)

        program.tell("call", "cuLaunchKernelEx", 7)

        assert counter.update().calls == 7


def test_library_beside_libcuda_is_a_problem(
    program: LaunchingProgram, count: Count, library: Path, tmp_path: Path
) -> None:
    """A program that has loaded a library which works without libcuda is never called quiet."""
    video = tmp_path / "libnvcuvid.so.580.1"
    shutil.copy(library, video)
    counter = count(program)
    settle(counter, program)

    program.tell("load", video)
    seen = counter.update()

    assert "it has loaded libnvcuvid.so.580.1" in seen.problem
    assert (seen.quiet, counter.counters) == (None, 0)


def test_program_without_libcuda_is_a_problem(library: Path, count: Count, tmp_path: Path) -> None:
    """A program that maps no libcuda is never called quiet."""
    other = tmp_path / "libother.so"
    shutil.copy(library, other)
    with launching_program(other) as program:
        seen = count(program).update()

        assert (seen.problem, seen.quiet) == ("it maps no libcuda.so", None)


def test_number_of_counters_is_limited(program: LaunchingProgram) -> None:
    """A program with too many threads that run is not counted, and that is said."""
    for _ in range(4):
        program.tell("poll", 0.001)
    counter = HolderCounter("/proc", (program.pid, program.start), CounterPool(2 * WORK))

    seen = look_until(counter, lambda seen: bool(seen.problem))

    assert f"may have {2 * WORK} counters" in seen.problem
    assert (seen.quiet, counter.counters) == (None, 0)


def test_another_process_with_the_pid_is_left_alone(
    program: LaunchingProgram, pool: CounterPool, library: Path
) -> None:
    """A process that only has the same pid is never touched."""
    before = code_of(program, library, "cuLaunchKernel")
    counter = HolderCounter("/proc", (program.pid, program.start - 1), pool)

    seen = counter.update()

    assert (seen.problem, seen.quiet, counter.counters) == ("it has ended", None, 0)
    assert code_of(program, library, "cuLaunchKernel") == before


def test_ended_program(library: Path, count: Count) -> None:
    """A program that ends while it is counted is not a failure."""
    with launching_program(library) as program:
        program.tell("poll", 0.01)
        counter = count(program)
        settle(counter, program)

    assert counter.update() == LaunchCount(program.pid, counter.update().start, None, 0, "it has ended")


def test_other_programs_have_no_breakpoint(program: LaunchingProgram, count: Count, library: Path) -> None:
    """Another program with the same library is not touched: it may be at work."""
    with launching_program(library) as other:
        before = code_of(other, library, "cuLaunchKernel")
        settle(count(program), program)

        assert code_of(other, library, "cuLaunchKernel") == before
        assert code_of(program, library, "cuLaunchKernel") != before


def test_nothing_is_left_when_we_are_killed(program: LaunchingProgram, library: Path) -> None:
    """After SIGKILL of the process that counts, the program has no breakpoint and runs on."""
    before = code_of(program, library, "cuLaunchKernel")
    script = (
        "import sys, time\n"
        "from vramledger.readers.launches.counter_pool import CounterPool\n"
        "from vramledger.readers.launches.holder import HolderCounter\n"
        "counter = HolderCounter('/proc', (int(sys.argv[1]), int(sys.argv[2])), CounterPool(1000))\n"
        "while counter.counters < 5: counter.update(); time.sleep(0.02)\n"
        "print('attached', flush=True)\n"
        "time.sleep(1000)\n"
    )
    command = [sys.executable, "-c", script, str(program.pid), str(program.start)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    counting = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert counting.stdout is not None
    assert counting.stdout.readline() == "attached\n"
    assert code_of(program, library, "cuLaunchKernel") != before

    counting.send_signal(signal.SIGKILL)
    counting.communicate()

    assert code_of(program, library, "cuLaunchKernel") == before
    program.tell("call", "cuLaunchKernel", 10)
