"""PyTorch: what its caching allocator holds on each device, from the allocator's own counters.

Only what reads memory of the process is called, and only once ``torch.cuda.is_initialized()``: the raw nested
counters (10.6 microseconds on an H200; flattening them as ``torch.cuda.memory_stats`` does takes 65), and at
most every half minute a snapshot without traces, for the largest free block. With ``cudaMallocAsync`` the
counters are the CUDA runtime's, which we do not call, so they are reported as not supported, as those of a
pluggable allocator are, which has none.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType

from vramledger.agent.frameworks.provider import Provider
from vramledger.agent.oom import handler
from vramledger.agent.torch import block_survey as heap
from vramledger.agent.torch import leak_detector
from vramledger.agent.torch import optimizer_steps as steps
from vramledger.agent.torch.counters import expandable_by_settings, figures, reclaimable
from vramledger.agent.worker import worker

NATIVE = "native"
POLICIES = {NATIVE: "caching", "cudaMallocAsync": "async"}


class PyTorch(Provider):
    """PyTorch in this process."""

    name = "torch"

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.cuda = torch.cuda
        self.backend: str | None = None
        self.expandable: bool | None = None
        self.count = 0
        self.used: set[int] = set()
        self.turn = 0
        self.current: dict[int, dict[str, object]] = {}
        self.heap = heap.Heap(torch)
        self.growth: dict[int, leak_detector.LeakDetector] = {}
        self.steps = steps.Steps(torch)
        self.supported: bool | None = None

    def hook(self, ready: Callable[[], None]) -> bool:
        """Queue our notice with what torch does when it initialises CUDA; it is called at once if it has."""
        self.cuda._lazy_call(ready)
        return True

    def initialised(self) -> bool:
        """Ask torch, which has a variable for it; it is False in a child that cannot use CUDA."""
        return bool(self.cuda.is_initialized())

    def begin(self) -> None:
        """Attach to out-of-memory errors and optimizer steps, and see which allocator it is."""
        native = self.torch._C
        self.backend = str(native._cuda_getAllocatorBackend())
        # One generator a device is made when CUDA is initialised; asking for the count would be a CUDA call.
        self.count = len(self.cuda.default_generators)
        settings = getattr(native, "_accelerator_getAllocatorSettings", None)
        self.expandable = expandable_by_settings(
            settings()
            if settings is not None
            else os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""
        )
        self.supported = self.backend == NATIVE
        if self.supported:
            handler.attach(self)
            worker.gc_monitor.read_allocated = self.allocated
        self.steps.watch()

    def end(self) -> None:
        """Let the optimizers go; the observer of failures cannot be detached, but silenced."""
        self.steps.unwatch()
        handler.silence()
        worker.gc_monitor.read_allocated = None

    def due(self) -> set[int]:
        """Return whose counters to read now: the used devices', and those of one more in turn.

        Of all while none is used, so that the first allocation is seen at once; of all at every reading would
        cost 9 us a device on an H200.
        """
        if not self.used:
            return set(range(self.count))
        return {*self.used, self.turn % self.count}

    def look(self, devices: set[int]) -> None:
        """Read the counters of some devices."""
        read = self.torch._C._cuda_memoryStats
        for ordinal in devices:
            stats = read(ordinal)
            self.current[ordinal] = stats
            if ordinal not in self.used and stats["allocation"]["all"]["allocated"]:
                self.used.add(ordinal)

    def allocated(self) -> int | None:
        """Return the bytes in the program's tensors on all devices; quick, for the collector's watch."""
        read = self.torch._C._cuda_memoryStats
        total: int = sum(read(ordinal)["allocated_bytes"]["all"]["current"] for ordinal in tuple(self.used))
        return total

    def observe(self) -> None:
        """Read the counters, and note how much is allocated: a leak is told by how that went."""
        if not self.supported:
            return
        try:
            self.look(self.due())
        except RuntimeError:  # an allocator that counts nothing, although it says it is the native one
            self.supported = False
            return
        self.turn += 1
        now = time.monotonic()
        for ordinal in tuple(self.used):
            figure = figures(self.current[ordinal])
            if figure["allocated"] is not None:
                self.growth.setdefault(ordinal, leak_detector.LeakDetector()).add(now, figure["allocated"])
        self.heap.look(now, list(self.current.values()))

    def read(self) -> dict[str, object] | None:
        """Return what the allocator holds on the devices that the program has used."""
        return {
            "framework": self.name,
            "version": str(self.torch.__version__),
            "supported": self.supported,
            "allocator": self.backend,
            "policy": POLICIES.get(self.backend or ""),
            "devices": [self.device(ordinal) for ordinal in sorted(self.used)] if self.supported else None,
        }

    def device(self, ordinal: int) -> dict[str, object]:
        """Return what the report says of one device."""
        figure = figures(self.current[ordinal])
        seen = self.heap.device(ordinal)
        expandable = self.expandable if seen is None else self.expandable or seen.expandable
        private = figure["private_pools"]
        if private is None and seen is not None:
            private = seen.private
        entry: dict[str, object] = {
            "ordinal": ordinal,
            **figure,
            "private_pools": private,
            "reclaimable": reclaimable(figure, expandable, private),
            "largest_free_block": None if seen is None else seen.largest_free,
            "categories": self.steps.categories(ordinal, figure["allocated"]),
        }
        return {name: value for name, value in entry.items() if value is not None}


def provider() -> Provider:
    """Return PyTorch's provider, in a process that has imported it."""
    return PyTorch(sys.modules["torch"])
