"""The allocator's counters, and the functions that read them."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

BACKEND = os.environ.get("FAKE_TORCH_BACKEND", "native")
CAPACITY = 80 * 2**30
SEGMENT = 2**21

FAMILIES = (
    "allocation segment active inactive_split allocated_bytes reserved_bytes active_bytes"
    " inactive_split_bytes requested_bytes"
).split()


class OutOfMemoryError(RuntimeError):
    """What torch raises."""


class Allocator:
    """One device's caching allocator: it reserves whole segments, and keeps what was freed."""

    def __init__(self) -> None:
        self.allocated = self.allocated_peak = self.reserved = self.count = self.live = 0
        self.ooms = self.retries = 0
        self.free = CAPACITY

    def allocate(self, size: int) -> None:
        """Take bytes, or fail as torch does: first the observers, then the exception."""
        missing = max(0, size - (self.reserved - self.allocated))
        segment = -(-missing // SEGMENT) * SEGMENT
        if segment > self.free:
            self.retries += 1
            self.ooms += 1
            for observer in observers:
                observer(allocators.index(self), size, CAPACITY, self.free)
            raise OutOfMemoryError("CUDA out of memory. Tried to allocate more than there is")
        self.reserved += segment
        self.free -= segment
        self.allocated += size
        self.count += 1
        self.live += 1
        self.allocated_peak = max(self.allocated_peak, self.allocated)

    def release(self, size: int) -> None:
        self.live -= 1
        self.allocated -= size


class _cuda_CUDAAllocator:  # noqa: N801 torch's own name
    """Any allocator."""


class _CUDAPluggableAllocator(_cuda_CUDAAllocator):
    """An allocator of the program's own, for a pool."""


def _cuda_customAllocator(alloc: int, free: int) -> _CUDAPluggableAllocator:  # noqa: N802
    del alloc, free
    return _CUDAPluggableAllocator()


allocators: list[Allocator] = []
observers: list[Callable[[int, int, int, int], None]] = []


graph_task = -1
"""The backward pass that runs; -1 for none."""


def _current_graph_task_id() -> int:
    return graph_task


def _cuda_init() -> None:
    if allocators:
        return
    torch.called("cuInit")
    allocators.extend(Allocator() for _ in range(int(os.environ.get("FAKE_TORCH_DEVICES", "2"))))


def _cuda_getAllocatorBackend() -> str:  # noqa: N802
    return BACKEND


def _accelerator_getAllocatorSettings() -> str:  # noqa: N802
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def _cuda_hostMemoryStats() -> dict[str, object]:  # noqa: N802
    return {
        "allocated_bytes": {"current": 4096, "peak": 8192},
        "active_bytes": {"current": 1024, "peak": 1024},
    }


def _cuda_isHistoryEnabled() -> bool:  # noqa: N802
    return torch.cuda.memory.recording is not None


def _cuda_memoryStats(ordinal: int) -> dict[str, object]:  # noqa: N802
    if BACKEND == "pluggable":
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")
    if BACKEND == "cudaMallocAsync":
        torch.called("cudaMemPoolGetAttribute")
    if not 0 <= ordinal < len(allocators):
        raise RuntimeError("Allocator not initialized for device: did you call init?")
    at = allocators[ordinal]
    values = {
        "allocation": (at.count, at.count, at.count),
        "active": (at.live, at.live, at.count),
        "allocated_bytes": (at.allocated, at.allocated_peak, at.count),
        "reserved_bytes": (at.reserved, at.reserved, at.count),
        "active_bytes": (at.allocated, at.allocated_peak, at.count),
        "requested_bytes": (at.allocated, at.allocated_peak, at.count),
    }
    stats: dict[str, object] = {}
    for family in FAMILIES:
        current, peak, total = values.get(family, (0, 0, 0))
        stat = {"current": current, "peak": peak, "allocated": total, "freed": 0}
        stats[family] = {"all": stat, "small_pool": dict(stat), "large_pool": dict(stat)}
    return {
        **stats,
        "num_alloc_retries": at.retries,
        "num_ooms": at.ooms,
        "max_split_size": -1,
        "reserved_bytes_by_private_pools": {},
    }


def _cuda_memorySnapshot(pool: tuple[int, int, bool] | None) -> dict[str, object]:  # noqa: N802
    del pool
    if BACKEND != "native":
        raise RuntimeError("does not yet support snapshot")
    segments = [
        {
            "device": ordinal,
            "total_size": at.reserved,
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "blocks": [
                {"size": at.allocated, "state": "active_allocated"},
                {"size": at.reserved - at.allocated, "state": "inactive"},
            ],
        }
        for ordinal, at in enumerate(allocators)
        if at.reserved
    ]
    return {"segments": segments, "device_traces": []}


def _cuda_attach_out_of_memory_observer(observer: Callable[[int, int, int, int], None]) -> None:
    torch.cuda._lazy_init()
    observers.append(observer)
