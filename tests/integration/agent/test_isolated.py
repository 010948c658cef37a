"""``isolated()`` runs a function in a process that ends afterwards, and returns its result."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from pickle import PicklingError

import psutil
import pytest

from tests.support import isolated_functions as functions
from tests.support.listening import AGENT_ROOT
from tests.support.requirements import require_frameworks
from tests.support.waiting import PATIENCE, wait_until
from vramledger_agent import IsolatedPool, isolated, isolated_async
from vramledger_agent.isolation import ChildTraceback, IsolationError

ROOT = Path(__file__).parents[3]


def left() -> set[str]:
    """Return what isolated() could leave in this process: children and descriptors."""
    lines = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended
            lines.add(" ".join(child.cmdline()))
    return {line for line in lines if line and "forkserver" not in line and "resource_tracker" not in line}


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_result_comes_back(method: str) -> None:
    """Arguments reach another process, its result returns, and by then the process has ended."""
    pid, arguments, named = isolated(functions.identity, 1, "two", method=method, three=[3.0])
    assert (arguments, named) == ((1, "two"), {"three": [3.0]})
    assert pid != os.getpid()
    assert not psutil.pid_exists(pid)
    assert multiprocessing.active_children() == []


def test_nothing_is_left() -> None:
    """Repeated calls leave no process and no descriptor behind, whether they succeed or fail."""
    isolated(functions.identity)  # the fork server starts
    before = psutil.Process().num_fds(), left()
    for function, arguments in ((functions.blob, (10_000_000,)), (functions.die, (9,)), (functions.fail, ())):
        try:
            isolated(function, *arguments)
        except (ValueError, IsolationError):
            continue
    assert (psutil.Process().num_fds(), left()) == before


def test_error_comes_back_as_itself() -> None:
    """An error is raised here as it was in the child, with the child's traceback as its cause."""
    with pytest.raises(ValueError, match="on purpose") as caught:
        isolated(functions.fail)
    assert isinstance(caught.value.__cause__, ChildTraceback)
    assert "isolated_functions.py" in str(caught.value.__cause__)
    assert 'raise ValueError("on purpose")' in str(caught.value.__cause__)


@pytest.mark.parametrize(
    ("function", "arguments", "words"),
    [
        (functions.die, (signal.SIGKILL,), "killed by SIGKILL"),
        (functions.die, (signal.SIGSEGV,), "killed by SIGSEGV"),
        (functions.vanish, (4,), "ended with status 4"),
        (functions.leave, (3,), "SystemExit: 3"),
        (functions.fail_oddly, (), "Odd: first"),
    ],
)
def test_end_is_told(function: Callable[..., object], arguments: tuple[object, ...], words: str) -> None:
    """A child that dies, exits or fails in an unusual way causes a clear error, and ends nothing else."""
    with pytest.raises(IsolationError, match=words):
        isolated(function, *arguments)


def test_what_cannot_be_carried() -> None:
    """A result that cannot be pickled is an error of the call, with pickle's own message."""
    with pytest.raises((AttributeError, TypeError, PicklingError), match="lambda"):
        isolated(functions.unpicklable)


@pytest.mark.parametrize("kind", [2, 10, 13, 1, 0])
def test_an_array_on_a_gpu_is_refused(kind: int) -> None:
    """An array on a GPU cannot be passed, whoever made it; one in host memory, or of size 0, comes back."""
    if kind < 2:
        assert isolated(functions.identity, functions.Array(kind))[1][0].kind == kind
        return
    with pytest.raises(TypeError, match="an array on a GPU cannot leave"):
        isolated(functions.identity, [functions.Array(kind)])


def test_time_limit(tmp_path: Path) -> None:
    """A child that takes too long is killed, and has ended when the error is raised."""
    file = tmp_path / "pid"
    with pytest.raises(TimeoutError, match="did not return within 5 s"):
        isolated(functions.hang, str(file), timeout=5.0)
    assert not psutil.pid_exists(int(file.read_text(encoding="ascii")))


def test_environment_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child has the environment of the moment of the call, not of the fork server's start."""
    isolated(functions.identity)
    monkeypatch.setenv("VRAMLEDGER_TEST", "now")
    assert isolated(functions.variable, "VRAMLEDGER_TEST") == "now"
    monkeypatch.delenv("VRAMLEDGER_TEST")
    assert isolated(functions.variable, "VRAMLEDGER_TEST") is None


def test_large_result() -> None:
    """A result that is much larger than a pipe or a socket holds is returned completely."""
    assert isolated(functions.blob, 200_000_000) == b"x" * 200_000_000


def test_child_ends_with_its_parent(tmp_path: Path) -> None:
    """When the caller is killed, the child ends too and frees its memory."""
    file = tmp_path / "pid"
    program = tmp_path / "program.py"
    imports = "from vramledger_agent import isolated\nfrom tests.support.isolated_functions import hang\n"
    program.write_text(f"{imports}if __name__ == '__main__':\n    isolated(hang, {str(file)!r})\n")
    environ = {**os.environ, "PYTHONPATH": f"{AGENT_ROOT}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, str(program)], env=environ) as process:
        wait_until(lambda: file.exists() and file.read_text(encoding="ascii"), "the child")
        process.kill()
    child = int(file.read_text(encoding="ascii"))
    wait_until(lambda: not psutil.pid_exists(child), "the child's end")


def test_grandchildren_end_with_the_child(tmp_path: Path) -> None:
    """After the time limit nothing is left of what the function has started, wherever it has gone."""
    file = tmp_path / "pids"
    with pytest.raises(TimeoutError):
        isolated(functions.hang_with_children, str(file), timeout=5.0)
    pids = [int(word) for word in file.read_text(encoding="ascii").split()]
    assert len(pids) == 3
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids), "their end")


def test_what_a_function_starts_ends_with_its_call() -> None:
    """A process that the function leaves running does not keep memory after its result is there."""
    pid = isolated(functions.leave_a_child)
    wait_until(lambda: not psutil.pid_exists(pid), "the end of what the function started")


def test_in_a_daemonic_process() -> None:
    """A worker of a pool, which Python forbids to have children, can call an isolated function."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(functions.call_isolated, [1, 2]) == [1, 2]


NOTEBOOK = """
import math, os
from vramledger_agent import isolated
factor = 3
def scale(value):
    return math.floor(value) * factor
def recursive(number, own=os.getpid()):
    assert os.getpid() != own
    return [scale(1.5)] + recursive(number - 1) if number else []
class Own:
    pass
print(isolated(recursive, 2, method="METHOD"))
try:
    isolated(isinstance, Own(), int, method="METHOD")
except Exception as error:
    print(type(error).__name__, error)
"""


def run(program: str | Path, *, python: str | Path = sys.executable) -> tuple[str, str, int]:
    """Run a file, or code as in a notebook, with our package; return output, errors and status."""
    command = [str(python), *((str(program),) if isinstance(program, Path) else ("-c", program))]
    environ = {**os.environ, "PYTHONPATH": f"{AGENT_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, check=False, timeout=3 * PATIENCE
    )
    return done.stdout, done.stderr, done.returncode


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_function_of_a_notebook(method: str) -> None:
    """A function whose main module has no file runs isolated; for a class the error says what to do."""
    out, errors, _ = run(NOTEBOOK.replace("METHOD", method))
    first, second = out.splitlines()
    assert (first, errors) == ("[3, 3]", "")
    assert second.startswith("PicklingError Own is a class of a notebook")


CLOUDPICKLE = """
from vramledger_agent import isolated
class Own:
    def __init__(self, value):
        self.value = value
def scale(own, factor):
    return (lambda: own.value * factor)()
print(isolated(scale, Own(2), 3))
"""


@pytest.mark.skipif(find_spec("cloudpickle") is None, reason="cloudpickle is not installed")
def test_a_class_of_a_notebook_with_cloudpickle() -> None:
    """Where cloudpickle is installed, objects of a notebook's own classes are passed."""
    assert run(CLOUDPICKLE) == ("6\n", "", 0)


def test_a_pool_keeps_its_process() -> None:
    """A pool's process runs one call after the other, ends after its idle time, and errors do not end it."""
    with IsolatedPool(idle_timeout=1.0) as pool:
        pid = pool.run(functions.identity)[0]
        with pytest.raises(ValueError, match="on purpose"):
            pool.run(functions.fail)
        assert pool.run(functions.identity, 5)[:2] == (pid, (5,))
        wait_until(lambda: not psutil.pid_exists(pid), "its end")
        again = pool.run(functions.identity)[0]
        assert again != pid
    assert not psutil.pid_exists(again)


def test_a_pool_replaces_a_process_that_died() -> None:
    """A call whose process dies or takes too long is an error; the next call has a new process."""
    with IsolatedPool() as pool:
        before = pool.run(functions.identity)[0]
        with pytest.raises(IsolationError, match="SIGKILL"):
            pool.run(functions.die, signal.SIGKILL)
        with pytest.raises(TimeoutError):
            pool.run(functions.hang, os.devnull, timeout=1.0)
        after = pool.run(functions.identity)[0]
        assert before != after
        os.kill(after, signal.SIGKILL)
        assert pool.run(functions.identity)[0] != after


def test_awaited() -> None:
    """A result can be awaited while others are."""

    async def main() -> list[object]:
        with IsolatedPool() as pool:
            results = await asyncio.gather(
                *(pool.run_async(functions.identity, number) for number in range(2)),
                isolated_async(functions.identity, 2),
            )
        return [result[1] for result in results]

    assert asyncio.run(main()) == [(0,), (1,), (2,)]


@pytest.mark.parametrize("pooled", [False, True])
def test_a_cancelled_task_leaves_no_process(tmp_path: Path, pooled: bool) -> None:
    """The process of a task that is cancelled has ended when the task has, in a pool and without one."""
    file = tmp_path / "pid"

    async def main() -> None:
        with IsolatedPool() as pool:
            run = pool.run_async if pooled else isolated_async
            hanging = asyncio.create_task(run(functions.hang, str(file)))
            await asyncio.to_thread(
                wait_until, lambda: file.exists() and file.read_text(encoding="ascii"), "its pid"
            )
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            assert not psutil.pid_exists(int(file.read_text(encoding="ascii")))

    asyncio.run(main())


class SlowToPickle:
    """An argument whose pickling takes until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type, tuple[int]]:
        self.begun.set()
        self.released.wait(60)
        return int, (1,)


def test_a_call_that_is_cancelled_before_it_is_sent_disturbs_no_other() -> None:
    """A pool's next call has a process of its own while a cancelled one still pickles its arguments."""
    argument = SlowToPickle()

    async def main() -> None:
        with IsolatedPool() as pool:
            first = await pool.run_async(functions.identity, 1)
            cancelled = asyncio.create_task(pool.run_async(functions.identity, argument))
            await asyncio.to_thread(argument.begun.wait, 60)
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            third = asyncio.create_task(pool.run_async(functions.identity, 3))
            assert (await third)[1] == (3,)
            argument.released.set()
            fourth = await pool.run_async(functions.identity, 4)
            assert fourth[1] == (4,)
            assert first[0] not in {third.result()[0], fourth[0]}

    asyncio.run(main())


def test_what_cannot_be_pickled_costs_a_pool_no_process() -> None:
    """After an argument that cannot be sent, the next call has the same process."""
    with IsolatedPool() as pool:
        pid = pool.run(functions.identity)[0]
        with pytest.raises(TypeError):
            pool.run(functions.identity, threading.Lock())
        assert pool.run(functions.identity)[0] == pid


ARRAYS = """
import numpy as np
from vramledger_agent import isolated

def double(array):
    return {"array": array * 2, "view": array[:3]}

def model(rows):
    import torch
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)(torch.ones(rows, 4)).detach().numpy()

if __name__ == "__main__":
    array = np.arange(5_000_000, dtype=np.float64)
    result = isolated(double, array)
    assert (result["array"] == array * 2).all() and (result["view"] == [0, 1, 2]).all()
    result["array"][0] = 7  # it is ours to write
    assert not result["array"].flags.owndata, "it was copied"
    assert isolated(model, 3).shape == (3, 2)
    import sys
    assert "torch" not in sys.modules
    print("good")
"""


@pytest.mark.thorough
def test_arrays_of_a_script(tmp_path: Path) -> None:
    """A script's own functions run isolated, and their arrays are returned writable and without a copy."""
    python = require_frameworks()
    program = tmp_path / "program.py"
    program.write_text(ARRAYS, encoding="utf-8")
    out, errors, status = run(program, python=python)
    assert (out, status) == ("good\n", 0), errors
