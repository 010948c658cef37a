"""The process that counts launches: a real one, with real programs, and the exporter's end of it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.launches.program import LaunchingProgram, build_library, launching_program
from tests.support.requirements import require_root, require_tool, require_uprobes
from tests.support.waiting import PATIENCE, wait_until
from vramledger.config import SamplingConfig
from vramledger.model.reading import LaunchCount, Reading
from vramledger.sampling.capabilities import read_permitted
from vramledger.sampling.launch_counter import LaunchCounter
from vramledger.serving.launch_counting import COLLECTOR, LaunchCounting, count_launches

pytestmark = pytest.mark.waits

CONFIG = SamplingConfig()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a stand-in for libcuda, on a machine that lets us count."""
    require_uprobes()
    return build_library(require_tool("cc"), tmp_path_factory.mktemp("driver"))


@pytest.fixture
def program(library: Path) -> Iterator[LaunchingProgram]:
    """Run a program of which one thread polls."""
    with launching_program(library) as running:
        running.tell("poll", 0.01)
        yield running


async def read_until(counting: LaunchCounting, reached: Callable[[Reading], bool]) -> Reading:
    """Return the first reading that shows something."""

    async def wait() -> Reading:
        while True:
            reading = await counting.add_counts(Reading(1.0, 1.0))
            if reached(reading):
                return reading
            await asyncio.sleep(0.02)

    return await asyncio.wait_for(wait(), PATIENCE)


def counted(work: Callable[[LaunchCounting], Awaitable[None]]) -> None:
    """Run a test with the process that counts."""

    async def run() -> None:
        async with count_launches(CONFIG) as counting:
            await work(counting)

    asyncio.run(run())


def only(reading: Reading) -> LaunchCount:
    """Return the one count of a reading."""
    (count,) = reading.launches
    return count


def child() -> psutil.Process:
    """Return the process that counts."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.Error):  # a child of another test that has just ended
            if "launch_counter" in " ".join(each.cmdline()):
                found.append(each)
    (process,) = found
    return process


def capabilities(pid: int) -> dict[str, int]:
    """Return the capability sets of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return {name: int(value, 16) for name, value in (line.split(":") for line in lines if "Cap" in line)}


def test_quiet_and_then_a_launch(program: LaunchingProgram) -> None:
    """A holder is quiet for as long as it calls nothing, and its launches are reported."""

    async def work(counting: LaunchCounting) -> None:
        counting.set_holders([(program.pid, program.start)])
        quiet = await read_until(
            counting, lambda reading: bool(reading.launches) and (only(reading).quiet or 0) > 2
        )
        assert only(quiet)[3:] == (0, "")
        assert quiet.collectors[COLLECTOR][0]

        program.tell("call", "cuCtxGetCurrent", 1)  # so the main thread has a counter
        await read_until(counting, lambda reading: (only(reading).quiet or 99) < 2)
        await read_until(counting, lambda reading: (only(reading).quiet or 0) > 1)
        program.tell("call", "cuLaunchKernel", 5)
        seen = await read_until(counting, lambda reading: only(reading).calls > 0)
        assert only(seen) == LaunchCount(program.pid, program.start, None, 5, "")

    counted(work)


def test_holder_that_is_not_wanted_is_forgotten(program: LaunchingProgram) -> None:
    """A holder that is not to be counted any more is not shown any more."""

    async def work(counting: LaunchCounting) -> None:
        counting.set_holders([(program.pid, program.start)])
        await read_until(counting, lambda reading: bool(reading.launches))
        counting.set_holders([])
        assert (await counting.add_counts(Reading(1.0, 1.0))).launches == ()

    counted(work)


def test_failed_sample_shows_no_counts() -> None:
    """A sample that failed has no counts and no collectors."""

    async def work(counting: LaunchCounting) -> None:
        failed = Reading(1.0, 1.0, failure=("timeout", "why"))
        assert (await counting.add_counts(failed)) == failed

    require_uprobes()
    counted(work)


def test_end_of_the_process_fails_the_collector(program: LaunchingProgram) -> None:
    """When the process that counts is killed, the collector fails, and no holder is called quiet any more."""

    async def work(counting: LaunchCounting) -> None:
        counting.set_holders([(program.pid, program.start)])
        await read_until(counting, lambda reading: bool(reading.launches))
        child().send_signal(signal.SIGKILL)
        reading = await read_until(counting, lambda reading: not reading.collectors[COLLECTOR][0])
        assert reading.launches == ()
        counting.set_holders([])
        counting.set_holders([(program.pid, program.start)])

    counted(work)


def test_it_ends_with_the_exporter(program: LaunchingProgram) -> None:
    """When the exporter is killed, the process that counts ends too."""
    script = (
        "import asyncio, sys\n"
        "from vramledger.config import SamplingConfig\n"
        "from vramledger.model.reading import Reading\n"
        "from vramledger.serving.launch_counting import count_launches\n"
        "async def run():\n"
        "    async with count_launches(SamplingConfig()) as counting:\n"
        "        counting.set_holders([(int(sys.argv[1]), int(sys.argv[2]))])\n"
        "        while not (await counting.add_counts(Reading(1.0, 1.0))).launches:\n"
        "            await asyncio.sleep(0.05)\n"
        "        print('counting', flush=True)\n"
        "        await asyncio.sleep(1000)\n"
        "asyncio.run(run())\n"
    )
    command = [sys.executable, "-c", script, str(program.pid), str(program.start)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as exporter:
        assert exporter.stdout is not None
        assert exporter.stdout.readline() == "counting\n"
        (counting,) = psutil.Process(exporter.pid).children()
        exporter.kill()
        counting.wait(PATIENCE)


def test_it_keeps_only_the_rights_that_it_needs(program: LaunchingProgram) -> None:
    """The process that counts has the rights to read and to count, and can get no other."""
    require_root()

    async def work(counting: LaunchCounting) -> None:
        counting.set_holders([(program.pid, program.start)])
        await read_until(counting, lambda reading: bool(reading.launches))
        held = capabilities(child().pid)
        needed = (1 << 2 | 1 << 19 | 1 << 21 | 1 << 38) & read_permitted()
        assert held["CapEff"] == held["CapPrm"] == needed
        assert held["CapAmb"] == held["CapInh"] == 0

    counted(work)


def test_files_that_hang_stop_nobody_else(program: LaunchingProgram, library: Path, tmp_path: Path) -> None:
    """A holder whose files never answer is said to hang, and the others are counted all the same."""
    with launching_program(library) as hanging:
        files = tmp_path / str(hanging.pid)
        thread = f"task/{hanging.pid}"
        (files / thread).mkdir(parents=True)
        (files / thread / "stat").write_bytes(Path(f"/proc/{hanging.pid}/stat").read_bytes())
        os.mkfifo(files / "maps")  # to open it waits for somebody who writes
        (tmp_path / str(program.pid)).symlink_to(f"/proc/{program.pid}")
        counter = LaunchCounter(str(tmp_path), hangs_after=0.5)
        counter.set_holders({(hanging.pid, hanging.start), (program.pid, program.start)})

        said: dict[int, LaunchCount] = {}

        def both_known() -> bool:
            said.update({count.pid: count for count in counter.counts()})
            return said.keys() == {hanging.pid, program.pid} and said[program.pid].quiet is not None

        wait_until(both_known, "both")
        counter.set_holders(set())

        assert said[hanging.pid].problem == "its files do not answer"
        assert (said[hanging.pid].quiet, said[program.pid].problem) == (None, "")


def test_a_look_that_came_late_is_no_second_holder(program: LaunchingProgram, tmp_path: Path) -> None:
    """A late answer and the next one are of the same holder, of which there is one count."""
    files, maps = tmp_path / str(program.pid), Path(f"/proc/{program.pid}/maps").read_bytes()
    (files / f"task/{program.pid}").mkdir(parents=True)
    (files / f"task/{program.pid}/stat").write_bytes(Path(f"/proc/{program.pid}/stat").read_bytes())
    os.mkfifo(tmp_path / "late")
    (files / "maps").hardlink_to(tmp_path / "late")
    counter = LaunchCounter(str(tmp_path))
    counter.set_holders({(program.pid, program.start)})

    assert counter.counts() == []
    (tmp_path / "now").write_bytes(maps)
    (tmp_path / "now").replace(files / "maps")
    (tmp_path / "late").write_bytes(maps)
    answers: list[list[LaunchCount]] = []

    def is_answered() -> bool:
        answers.append(counter.counts())
        return bool(answers[-1])

    wait_until(is_answered, "an answer")

    assert len(answers[-1]) == 1


def test_without_the_right_it_says_why() -> None:
    """Without the right to count it ends with one line that says what is missing, and counts nothing."""
    require_root()
    bare = [str(require_tool("setpriv")), "--inh-caps=-all", "--bounding-set=-all", sys.executable]
    program = "from vramledger.sampling.launch_counter import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*bare, "-c", program, "/proc"], capture_output=True, text=True, env=environment, check=False
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (5, "")
    assert 'msg="No launches are counted" err="it needs CAP_SYS_ADMIN"' in line
