"""Threads that sleep in the driver, found among real processes in state D."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.sure import sure
from tests.support.waiting import wait_until
from vramledger.model.reading import DriverWait, ProcessRow
from vramledger.readers.hosts.driver_waits import DriverWaitSearch
from vramledger.readers.hosts.stat import read_row

_CLONE_VFORK = 0x4000
_SYS_CLONE = {"x86_64": 56, "aarch64": 220}.get(os.uname().machine, 0)

pytestmark = pytest.mark.skipif(
    Path("/proc/self/wchan").exists() is False or not _SYS_CLONE, reason="this kernel has no wchan"
)


def _sleep_in_vfork() -> None:
    """Sleep in the kernel, without interruption, until the child exits: what vfork does; then again."""
    while ctypes.CDLL(None).syscall(_SYS_CLONE, _CLONE_VFORK | signal.SIGCHLD, 0, 0, 0, 0) != 0:
        pass
    signal.pause()


@contextmanager
def sleeper(*, in_a_thread: bool = False) -> Iterator[ProcessRow]:
    """Run a process of whose threads one sleeps without interruption."""
    pid = os.fork()
    if not pid:
        os.setsid()
        if in_a_thread:
            threading.Thread(target=_sleep_in_vfork).start()
            signal.pause()
        _sleep_in_vfork()
        os._exit(0)
    try:
        wait_until(lambda: sleeping_threads(pid), "a thread to sleep")
        yield sure(read_row("/proc", pid))
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def sleeping_threads(pid: int) -> list[Path]:
    """Return the thread that has made a child and sleeps until the child exits, if it does already.

    A page fault, too, puts a thread into state D for a moment: so its child must be there, and it alone.
    """
    children = [each for each in psutil.Process(pid).children() if each.status() != psutil.STATUS_ZOMBIE]
    found = [each for each in Path(f"/proc/{pid}/task").iterdir() if ") D " in (each / "stat").read_text()]
    return found if children and len(found) == 1 else []


def channel(pid: int) -> str:
    """Return where the kernel says that the thread of a sleeper sleeps."""
    (thread,) = wait_until(lambda: sleeping_threads(pid), "a thread to sleep")
    found = (thread / "wchan").read_text()
    if found == "0":
        pytest.skip("this kernel does not tell where a thread sleeps")
    return found


def symbols(tmp_path: Path, name: str, module: str) -> str:
    path = tmp_path / "kallsyms"
    path.write_text(f"0000000000000000 T start_kernel\n0000000000000000 t {name}\t{module}\n")
    return str(path)


def search(rows: list[ProcessRow], symbol_file: str) -> tuple[DriverWait, ...]:
    """Search two whole rounds: the first one finds which function it must look up."""
    found = DriverWaitSearch("/proc", symbols=symbol_file, round_interval=0.0)
    for _ in range(200):
        found.search(rows, budget_seconds=1.0)
        if found.result:
            break
        time.sleep(0.001)  # the list of symbols is read in a thread
    return found.result


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_a_thread_that_sleeps_in_the_driver_is_found(tmp_path: Path, in_a_thread: bool) -> None:
    """The main thread or another one: with its process, its function, and how often it has run."""
    with sleeper(in_a_thread=in_a_thread) as row:
        where = channel(row.pid)
        (wait,) = search([row], symbols(tmp_path, where, "[nvidia_uvm]"))
    assert (wait.pid, wait.start, wait.channel) == (row.pid, row.start, where)
    assert (wait.thread == row.pid) is not in_a_thread


def test_only_two_looks_prove_that_a_thread_has_slept_in_between(tmp_path: Path) -> None:
    """One look proves nothing, however long ago; a thread that ran between two looks begins again at 0."""
    now = 0.0
    with sleeper() as row:
        listed = symbols(tmp_path, channel(row.pid), "[nvidia]")
        found = DriverWaitSearch("/proc", symbols=listed, round_interval=0.0, clock=lambda: now)

        def look(after: float) -> list[float]:
            nonlocal now
            now += after
            found.search([row], budget_seconds=1.0)
            return [wait.seconds for wait in found.result]

        wait_until(lambda: look(0.0), "the list of symbols")
        now += 1000.0
        assert found.result[0].seconds == 0.0
        assert look(0.0) == [1000.0]
        assert look(50.0) == [1050.0]
        process = psutil.Process(row.pid)
        (child,) = process.children()
        child.kill()
        wait_until(lambda: len(process.children()) > 1 and sleeping_threads(row.pid), "it to sleep again")
        now += 70.0
        wait_until(lambda: look(0.0), "its sleep to be read, which takes the kernel a moment")
        assert found.result[0].seconds == 0.0


@pytest.mark.parametrize("module", ["[ext4]", "[nvidiafb2]", "", "/proc/kallsyms", "/nowhere"])
def test_a_thread_that_sleeps_elsewhere_in_the_kernel_is_not(tmp_path: Path, module: str) -> None:
    """State D elsewhere in the kernel, or where the list of symbols is hidden, says nothing about a GPU."""
    with sleeper() as row:
        listed = module if module.startswith("/") else symbols(tmp_path, channel(row.pid), module)
        assert search([row], listed) == ()


def test_another_process_with_the_pid_is_left_out(tmp_path: Path) -> None:
    """A row of an earlier process with the pid gets no wait of the present one."""
    with sleeper() as row:
        listed = symbols(tmp_path, channel(row.pid), "[nvidia]")
        assert search([row._replace(start=row.start - 1)], listed) == ()
