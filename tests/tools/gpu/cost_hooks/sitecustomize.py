"""Profile every Python process that is started with this directory first in ``PYTHONPATH``.

Two signals to a process begin and end a profile: SIGUSR2 begins it, and the next one writes it to
``$COST_PROFILE/PID.json``: the functions of the main thread, by cProfile, and every call of NVML with its
count, its elapsed time and the CPU time of its thread. The file is opened at the start, as the exporter gives
up its rights later.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import signal
import sys
import threading
import time
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType
from typing import Any

MOST = 120
"""Functions that are written, those with the most time of their own and of all that they call."""

_calls: dict[str, list[float]] = {}
"""NVML's functions: count, seconds, CPU seconds."""
_counting = threading.Event()


def _timed(name: str, function: Callable[..., int]) -> Callable[..., int]:
    row = _calls.setdefault(name, [0, 0.0, 0.0])

    def call(*arguments: object) -> int:
        if not _counting.is_set():
            return function(*arguments)
        begun, used = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments)
        finally:
            row[0] += 1
            row[1] += time.perf_counter() - begun
            row[2] += time.thread_time() - used

    return call


class _Hooked(Loader):
    """Load pynvml, and time what it takes from the library."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401 the loader of the import system
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        find = module._nvmlGetFunctionPointer
        known: dict[str, Callable[..., int]] = {}

        def timed(name: str) -> Callable[..., int]:
            if name not in known:
                known[name] = _timed(name, find(name))
            return known[name]

        module._nvmlGetFunctionPointer = timed  # type: ignore[attr-defined]


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:  # noqa: ANN401
        if fullname != "pynvml":
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None:
            spec.loader = _Hooked(spec.loader)
        return spec


class _Profiler:
    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._file: int | None = None
        self._profile: cProfile.Profile | None = None
        self._used = self._begun = 0.0
        self.open()

    def open(self) -> None:
        path = os.path.join(self._directory, f"{os.getpid()}.json")  # noqa: PTH118 pathlib takes 5 ms more
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def turn(self, _number: int, _frame: FrameType | None) -> None:
        if self._profile is None:
            self._used, self._begun = time.process_time(), time.monotonic()
            self._profile = cProfile.Profile(time.process_time)
            _counting.set()
            self._profile.enable()
            return
        self._profile.disable()
        _counting.clear()
        stats: Any = pstats.Stats(self._profile)
        rows = [
            {"function": f"{file}:{line}({name})", "calls": calls, "own": own, "all": whole}
            for (file, line, name), (_, calls, own, whole, _) in stats.stats.items()
        ]
        top = {
            row["function"]: row
            for key in ("own", "all")
            for row in sorted(rows, key=lambda row: -row[key])[:MOST]
        }
        told = {
            "argv": sys.orig_argv[-4:],
            "seconds": time.monotonic() - self._begun,
            "cpu": time.process_time() - self._used,
            "nvml": _calls,
            "functions": sorted(top.values(), key=lambda row: -row["own"]),
        }
        self._profile = None
        if self._file is not None:
            os.write(self._file, json.dumps(told, default=str).encode())


if "COST_PROFILE" in os.environ:
    sys.meta_path.insert(0, _Finder())
    _profiler = _Profiler(os.environ["COST_PROFILE"])
    os.register_at_fork(after_in_child=_profiler.open)
    signal.signal(signal.SIGUSR2, _profiler.turn)
