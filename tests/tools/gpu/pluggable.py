"""Does the agent stop a program whose allocator is Python? ``python -m tests.tools.gpu.pluggable``.

The caching allocator calls such an allocator with its lock held, and the allocator waits for the GIL. Each
case is a program with real pluggable allocators, whose thread of the agent reports every few milliseconds. In
``unguarded`` the agent's own check is turned off, so that one sees whether the case can stop at all. Writes
``pluggable.json`` with the stacks of a program that stopped. A few seconds more than ``--seconds``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.listening import FAKE, PROJECT, STARTUP

MIB = 2**20
SILENT_SECONDS = 8.0
"""A program that does nothing for so long has stopped."""

CASES = {
    "pool, agent guarded": ("pool", "guarded"),
    "pool and a second thread, agent guarded": ("threads", "guarded"),
    "pools that are made while the agent reports, agent guarded": ("births", "guarded"),
    "allocator of the whole program, agent guarded": ("whole", "guarded"),
    "pool, agent unguarded": ("pool", "unguarded"),
    # torch makes a MemPool with the GIL held, and waits for its own lock: two threads stop each other.
    "two threads that make pools, no agent": ("two pools", "none"),
}


class Calls:
    """An allocator in Python, called through C function pointers, over the driver's own allocation."""

    def __init__(self) -> None:
        import ctypes

        self.count = 0
        driver = ctypes.CDLL("libcuda.so.1")
        pointer, size_t = ctypes.c_void_p, ctypes.c_size_t

        def allocate(size: int, _device: int, _stream: int | None) -> int | None:
            self.count += 1
            address = ctypes.c_uint64(0)
            failed = driver.cuMemAlloc_v2(ctypes.byref(address), size_t(size))
            return None if failed else address.value

        def free(address: int | None, _size: int, _device: int, _stream: int | None) -> None:
            self.count += 1
            driver.cuMemFree_v2(ctypes.c_uint64(address or 0))

        self.functions = (
            ctypes.CFUNCTYPE(pointer, size_t, ctypes.c_int, pointer)(allocate),
            ctypes.CFUNCTYPE(None, pointer, size_t, ctypes.c_int, pointer)(free),
        )

    def wrap(self, torch: Any) -> Any:  # noqa: ANN401 torch's own object
        """Return torch's pluggable allocator of these functions, which it usually loads from a library."""
        import ctypes

        addresses = [ctypes.cast(each, ctypes.c_void_p).value for each in self.functions]
        kind = torch.cuda.memory.CUDAPluggableAllocator
        wrapped = kind.__new__(kind)
        wrapped._allocator = torch._C._cuda_customAllocator(*addresses)
        return wrapped


def hurried_worker() -> Any:  # noqa: ANN401 the agent's worker, which only a program with the agent has
    """Return the agent's worker, once it reports every few milliseconds."""
    from vramledger.agent.worker import worker

    deadline = time.monotonic() + 30
    while not worker.poller.has_started() and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.settings.interval = 0.002
    time.sleep(1.5)  # the turn that was planned before
    return worker


def allocate_once(torch: Any) -> None:  # noqa: ANN401 either torch
    """Allocate and free through torch's own allocator."""
    if "fake" in torch.__version__:
        torch.Tensor(MIB)
    else:
        torch.empty(32 * MIB, dtype=torch.uint8, device="cuda")


def program(case: str, guard: str, seconds: float) -> None:
    """Allocate and free through an allocator in Python, beside an agent that reports as fast as it can."""
    import torch

    fake = "fake" in torch.__version__
    calls = None if fake else Calls()

    def wrap() -> Any:  # noqa: ANN401 torch's own object
        return torch._C._cuda_customAllocator(0, 0) if calls is None else calls.wrap(torch)

    if guard == "unguarded":
        from vramledger.agent.torch.custom_allocators import CustomAllocators

        CustomAllocators.exist = lambda self: False  # type: ignore[method-assign]  # noqa: ARG005
    if case == "whole":
        wrapped = wrap()
        if not fake:
            torch.cuda.memory.change_current_allocator(wrapped)
    allocate_once(torch)

    worker = None if guard == "none" else hurried_worker()

    end = time.monotonic() + seconds
    turns = {"rounds": 0}
    turn = fill(torch, calls, wrap, births=case == "births")

    def beside() -> None:
        while time.monotonic() < end:
            allocate_once(torch) if case == "threads" else turn()

    if case in ("threads", "two pools"):
        threading.Thread(target=beside, daemon=True).start()
    begun = worker.session.sequence if worker is not None else 0
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(SILENT_SECONDS, exit=True)
        turn()
        turns["rounds"] += 1
    faulthandler.cancel_dump_traceback_later()
    entry: Any = worker.poller.states["torch"].provider.read() if worker is not None else {}
    told = {
        **turns,
        "calls": None if calls is None else calls.count,
        "reports": None if worker is None else worker.session.sequence - begun,
        "errors": None if worker is None else worker.errors,
        "supported": entry.get("supported"),
        "devices": len(entry.get("devices") or ()),
    }
    print(json.dumps(told), flush=True)
    os._exit(0)  # what torch frees at its end is not the question


def fill(
    torch: Any,  # noqa: ANN401 either torch
    calls: Calls | None,
    wrap: Callable[[], Any],
    *,
    births: bool,
) -> Callable[[], None]:
    """Return a function that fills and empties a pool whose allocator is Python."""
    if calls is None:
        made = [wrap()]

        def pretend() -> None:
            made[:] = [wrap()]
            torch.Tensor(MIB)
            time.sleep(0.0005)

        return pretend
    first = wrap()
    whole = torch.cuda.memory.get_allocator_backend() == "pluggable"

    def turn() -> None:
        wrapped = wrap() if births else first
        if whole:
            for size in range(1, 9):
                torch.empty(size * MIB, dtype=torch.uint8, device="cuda")
            return
        allocator = wrapped.allocator() if hasattr(wrapped, "allocator") else wrapped._allocator
        pool = torch.cuda.MemPool(allocator)
        with torch.cuda.use_mem_pool(pool):
            tensors = [torch.empty(size * 4 * MIB, dtype=torch.uint8, device="cuda") for size in range(1, 9)]
        del tensors
        del pool

    return turn


def run(seconds: float, *, rehearse: bool) -> dict[str, Any]:
    """Run all cases side by side; return what each told, its status and its last stacks."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="vl-") as directory:
        from tests.support.listening import FakeExporter

        with FakeExporter(Path(directory, "a.sock")) as exporter:
            path = [str(STARTUP), *([str(FAKE)] if rehearse else []), str(PROJECT)]
            environ = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path),
                "VRAMLEDGER_AGENT": "1",
                "VRAMLEDGER_AGENT_SOCKET": str(exporter.path),
                "VRAMLEDGER_AGENT_REPORTS": directory,
            }
            running = {}
            for name, arguments in CASES.items():
                command = [sys.executable, "-m", "tests.tools.gpu.pluggable", "--program", *arguments]
                running[name] = subprocess.Popen(
                    [*command, str(seconds)], cwd=PROJECT, text=True,
                    env={**environ, "VRAMLEDGER_AGENT": "0" if arguments[1] == "none" else "1"},
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )  # fmt: skip
            end = time.monotonic() + seconds + 60
            for name, process in running.items():
                try:
                    out, errors = process.communicate(timeout=max(1, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    process.kill()
                    out, errors = process.communicate()
                told = json.loads(out.splitlines()[-1]) if out.startswith("{") else {}
                found[name] = {
                    "stopped": "Timeout" in errors or not told,
                    "told": told,
                    "status": process.returncode,
                    "errors": errors[-6000:],
                    "last_report": exporter.reports.get(process.pid, [])[-1:],
                }
    return found


def main() -> int:
    """Run the cases and write the results; 1 when a program with the agent as it is stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "pluggable-gpu")))
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: only the motions")
    parser.add_argument("--program", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        program(args.program[0], args.program[1], float(args.program[2]))
    args.out.mkdir(parents=True, exist_ok=True)
    found = run(args.seconds, rehearse=args.rehearse)
    (args.out / "pluggable.json").write_text(json.dumps(found, indent=1))
    wrong = 0
    for name, each in found.items():
        bad = each["stopped"] and CASES[name][1] == "guarded"
        wrong += bad
        print(f"{'MISSED' if bad else 'met'}: {name}: stopped {each['stopped']} {each['told']}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
