"""A program with a stand-in libcuda, which obeys the lines on its stdin and answers each with a line.

It uses no GPU: only the functions' names and their calls matter here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PROGRAM = r"""
import ctypes, os, subprocess, sys, threading, time
library = ctypes.CDLL(sys.argv[1])
wake = threading.Event()

def call(name, times):
    for _ in range(int(times)):
        getattr(library, name)()

def sleep_then_call(name):
    wake.wait()
    call(name, 1)

def start(number):
    threads = [threading.Thread(target=wake.wait, daemon=True) for _ in range(int(number))]
    [each.start() for each in threads]

def sleeper(name):
    threading.Thread(target=sleep_then_call, args=(name,), daemon=True).start()

def short(name):
    thread = threading.Thread(target=call, args=(name, 1))
    thread.start()
    thread.join()

def poll(seconds, name="poll"):
    def run():
        ctypes.CDLL(None).prctl(15, name.encode(), 0, 0, 0)
        while True:
            time.sleep(float(seconds))
    threading.Thread(target=run, daemon=True).start()

def load(path):
    global library
    library = ctypes.CDLL(path)

def child():
    subprocess.run(["true"], check=True)

def fork(name):
    global child_pid, child_pipe
    child_pipe, theirs = os.pipe()[::-1]
    child_pid = os.fork()
    if child_pid == 0:
        os.close(child_pipe)
        call(name, 1)
        os.read(theirs, 1)
        call(name, 1)
        os._exit(0)
    os.close(theirs)

def end_fork():
    os.write(child_pipe, b"x")
    print(os.waitstatus_to_exitcode(os.waitpid(child_pid, 0)[1]), flush=True)

def execute(path):
    os.execv(sys.executable, [sys.executable, "-c", sys.argv[2], path, sys.argv[2]])

commands = {f.__name__: f for f in (call, start, sleeper, short, poll, load, child, fork, end_fork, execute)}
commands["wake"] = wake.set
print("ready", flush=True)
for line in sys.stdin:
    name, *arguments = line.split()
    commands[name](*arguments)
    print("done", flush=True)
"""


class LaunchingProgram:
    """A running program."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Wrap a process that runs :data:`PROGRAM`."""
        self._process = process
        self.pid = process.pid
        self._read("ready")

    @property
    def start(self) -> int:
        """Its start time in clock ticks since boot."""
        return int(Path(f"/proc/{self.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])

    def tell(self, *words: object, answer: str = "done") -> list[str]:
        """Have it do something, and return what it prints before its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()
        return self._read(answer)

    def _read(self, answer: str) -> list[str]:
        assert self._process.stdout is not None
        lines: list[str] = []
        for line in self._process.stdout:
            if line.strip() == answer:
                return lines
            lines.append(line.strip())
        message = f"the program ended instead of saying {answer!r}"
        raise AssertionError(message)


@contextlib.contextmanager
def launching_program(library: Path, *wrapper: str) -> Iterator[LaunchingProgram]:
    """Run a program that has loaded the library; ``wrapper`` is a command that starts it."""
    command = [*wrapper, sys.executable, "-c", PROGRAM, str(library), PROGRAM]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield LaunchingProgram(process)
    finally:
        process.kill()
        process.communicate()


FUNCTIONS = (
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuGraphLaunch",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuCtxGetCurrent",
    "cuStreamSynchronize",
)
ALIAS = "cuMemcpyAsync"
"""Another name of ``cuMemcpyHtoDAsync_v2`` in the stand-in."""


def build_library(compiler: Path, directory: Path, functions: tuple[str, ...] = FUNCTIONS) -> Path:
    """Compile a stand-in ``libcuda.so.1`` with these functions; each returns its own number."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = [f"int {name}(void) {{ return {number}; }}" for number, name in enumerate(functions, 1)]
    if "cuMemcpyHtoDAsync_v2" in functions:
        lines.append(f'int {ALIAS}(void) __attribute__((alias("cuMemcpyHtoDAsync_v2")));')
    source = directory / "libcuda.c"
    source.write_text("\n".join(lines) + "\n", encoding="ascii")
    library = directory / "libcuda.so.1"
    command = [str(compiler), "-shared", "-fPIC", "-O1", "-fno-ipa-icf", "-o", str(library), str(source)]
    subprocess.run(command, check=True, env={**os.environ, "LC_ALL": "C"})
    return library
