"""``serve --collector.launches``: quiet holders beside busy ones, as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.exporter import QUICK, Exporter, Page, run, serving
from tests.support.launches.program import LaunchingProgram, build_library, launching_program
from tests.support.players.stage import Stage
from tests.support.requirements import require_root, require_tool, require_uprobes
from tests.support.standin.library import GIB, Code, StandIn
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.waits

FLAGS = (*QUICK, "--idle-after=6s", "--collector.launches")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[LaunchingProgram]:
    """Run a program with a stand-in libcuda, of which one thread polls."""
    require_uprobes()
    with launching_program(build_library(require_tool("cc"), tmp_path)) as running:
        running.tell("poll", 0.05)
        yield running


@pytest.fixture
def crowded(standin: StandIn, stage: Stage, program: LaunchingProgram) -> StandIn:
    """Let the program hold memory beside another one that keeps a GPU without GPM busy."""
    standin.fail("nvmlGpmQueryDeviceSupport", Code.NOT_SUPPORTED)
    other = stage.start().pid
    device = standin.device(0)
    device.set_processes([(program.pid, GIB), (other, GIB)])
    device.busy(other, sm=0.9)
    return standin


def grade(page: Page, program: LaunchingProgram) -> tuple[str, str] | None:
    """Return the state and the grade of the program."""
    for key in page.values("process_state_since_timestamp_seconds", pid=program.pid):
        labels = dict(key)
        return labels["state"], labels["grade"]
    return None


def counters(exporter: Exporter) -> list[psutil.Process]:
    """Return the processes that count."""
    return [each for each in exporter.process.children() if "launch_counter" in " ".join(each.cmdline())]


def test_quiet_holder_on_a_busy_device(crowded: StandIn, program: LaunchingProgram) -> None:
    """A quiet holder beside a busy one is proven idle, and its first launch makes it active."""
    with serving(*FLAGS, driver=crowded.env()) as exporter:
        exporter.until(lambda page: grade(page, program) == ("idle", "proven"), "the proof")
        page = exporter.next_sample()
        assert page.value("collector_success", collector="launches") == 1
        assert page.value("launch_counted_processes", result="quiet") == 1

        program.tell("call", "cuCtxGetCurrent", 1)  # so that the main thread has a counter
        exporter.until(lambda page: grade(page, program) != ("idle", "proven"), "a thread that ran")
        exporter.until(lambda page: grade(page, program) == ("idle", "proven"), "the proof again")
        program.tell("call", "cuLaunchKernel", 1)
        exporter.until(lambda page: grade(page, program) == ("active", "proven"), "the launch")
        (counting,) = counters(exporter)
    counting.wait(PATIENCE)


def test_sampler_and_web_part_get_no_new_right(crowded: StandIn) -> None:
    """Only the process that counts has the right to count; the web part and the sampler have given it up."""
    require_root()
    with serving(*FLAGS, driver=crowded.env()) as exporter:
        exporter.until(
            lambda page: page.value("collector_success", collector="launches") == 1, "the counting"
        )
        admin = 1 << 21
        (counting,) = counters(exporter)
        for process, allowed in ((exporter.process, False), (exporter.sampler, False), (counting, True)):
            lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
            permitted = next(int(line.split()[1], 16) for line in lines if line.startswith("CapPrm"))
            assert bool(permitted & admin) is allowed


def test_without_the_right_all_else_goes_on(standin: StandIn, stage: Stage) -> None:
    """Without the right to count, the collector fails, the log says why, and all else is served."""
    require_root()
    wrapper = [str(require_tool("setpriv")), "--inh-caps=-all", "--bounding-set=-all"]
    standin.device(0).set_processes([(stage.start().pid, GIB)])
    with serving(*FLAGS, driver=standin.env(), wrapper=wrapper) as exporter:
        exporter.until(lambda page: page.values("process_memory_bytes"), "the holder")
        page = exporter.until(
            lambda page: page.value("collector_success", collector="launches") == 0, "the failure"
        )
        assert page.values("launch_counted_processes") == {}
        said = "No launches are counted"  # by the process that counts, which may still be at it
        wait_until(lambda: said in exporter.log, "its line in the log")
        assert exporter.log.count(said) == 1
        assert "it needs CAP_SYS_ADMIN" in exporter.log


def test_doctor_says_whether_it_can_work(standin: StandIn) -> None:
    """``doctor`` says that launches can be counted, or what is missing."""
    require_root()
    require_uprobes()
    bare = [str(require_tool("setpriv")), "--inh-caps=-all", "--bounding-set=-all"]
    able = run("doctor", driver=standin.env()).stdout
    unable = run("doctor", driver=standin.env(), wrapper=bare).stdout

    assert "launches: nothing counts them; " in able
    assert "it needs CAP_SYS_ADMIN" in unable
