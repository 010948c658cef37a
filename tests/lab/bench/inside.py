"""What does the agent cost a program: at the start of every interpreter, and where a framework comes?

The bars are for the least of many fresh interpreters in turns: the median is what one happens to wait.
"""

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

from tests.lab.bench.scene import ROOT
from tests.lab.bench.table import Row

_START = 0.002
_IMPORT = 0.010
_MEMORY = 2 * 2**20

_LOADED = (
    "array atexit collections enum errno fcntl gc itertools json re socket struct threading types weakref"
)
"""Modules that a program with a framework has imported before us: torch 2.13 imports all of them."""

_PROGRAM = """\
import sys, time
sys.path[:0] = {path!r}
{before}
def dirty():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Private_Dirty"))
at, begun = dirty(), time.perf_counter()
import vramledger_agent
vramledger_agent.start()
{after}
took = time.perf_counter() - begun
print(took, dirty() - at)
"""

_ALL = "import vramledger_agent.worker, vramledger_agent.frameworks.torch"
"""Modules that ``import torch`` and the start of CUDA make the agent import."""


def measure(*, times: int) -> Iterator[Row]:
    """Yield the additional time of an interpreter's start, and the time of importing the agent."""
    with tempfile.TemporaryDirectory(prefix="inside-") as directory:
        place = Path(directory)
        checkout, uncompiled = ROOT / "exporter/agent/vramledger_agent", shutil.ignore_patterns("__pycache__")
        package = shutil.copytree(checkout, place / "vramledger_agent", ignore=uncompiled)
        source = shutil.copytree(package / "startup", place / "source")
        compileall.compile_dir(package, quiet=1)
        venv.create(place / "bare", symlinks=True)  # nothing is installed, so nothing else starts with it
        python = str(place / "bare" / "bin" / "python")
        yield from _starts(python, package / "startup", source, times)
        yield from _imports(place, times)


def _starts(python: str, compiled: Path, source: Path, times: int) -> Iterator[Row]:
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    usual["PYTHONDONTWRITEBYTECODE"] = "1"
    ours = {"VRAMLEDGER_AGENT": "1", **usual}
    cases = {
        "without": usual,
        "compiled": {**ours, "PYTHONPATH": str(compiled)},
        "not compiled": {**ours, "PYTHONPATH": str(source)},
    }
    took: dict[str, list[float]] = {name: [] for name in cases}
    for turn in range(times):
        for name in sorted(cases, reverse=turn % 2 == 1):
            took[name].append(_start(python, cases[name]))
    for name in ("compiled", "not compiled"):
        least = min(took[name]) - min(took["without"])
        what = f"start of an interpreter, {name}, CPU, least of {times}"
        yield Row("agent", what, least, unit="s", bar=_START)


def _start(python: str, env: dict[str, str]) -> float:
    """Return the CPU seconds, which do not include other programs."""
    child = os.posix_spawn(python, [python, "-c", "pass"], env)
    _, _, used = os.wait4(child, 0)
    return used.ru_utime + used.ru_stime


def _imports(place: Path, times: int) -> Iterator[Row]:
    fake = str(ROOT / "tests" / "support" / "frameworks" / "standin")
    loaded = f"import {', '.join(_LOADED.split())}\nimport torch"
    for what, path, before, after in (
        ("import and start()", [str(place)], "", ""),
        ("all of it, with torch", [str(place), fake], loaded, _ALL),
    ):
        code = _PROGRAM.format(path=path, before=before, after=after)
        runs = []
        for _ in range(times):
            said = subprocess.check_output([sys.executable, "-I", "-c", code])
            runs.append([float(word) for word in said.split()])
        memory = statistics.median(run[1] for run in runs)
        yield Row("agent", f"{what}, least of {times}", min(run[0] for run in runs), unit="s", bar=_IMPORT)
        yield Row("agent", f"{what}, memory of its own", memory, unit="B", bar=_MEMORY)
