"""Read CuPy's pools in this process: the default one, and the one that the program has set instead.

A pool answers for the calling thread's current device, so it is read only where there can be only one device.
CuPy has no attribute for the allocator, but Python's collector tells to which objects a pool refers. That was
checked with CuPy 14.2; a version that keeps the allocator elsewhere leaves it not known.
"""

from __future__ import annotations

import gc
from typing import Any

from vramledger_agent.frameworks import provider
from vramledger_agent.frameworks.provider import OneDeviceProvider, OutOfMemoryMessage, read_requested


class CuPy(OneDeviceProvider):
    name = "cupy"

    def read_device(self, module: Any) -> dict[str, object]:  # noqa: ANN401 CuPy is not installed where this is checked
        pools = _pools(module)
        return {
            "allocator": "pool",
            "policy": "caching",
            "devices": [
                {
                    "ordinal": 0,
                    "in_use": sum(int(pool.used_bytes()) for pool in pools),
                    "pool": sum(int(pool.total_bytes()) for pool in pools),
                    "limit": int(pools[-1].get_limit()) or None,  # 0 means none
                    "managed": sum(int(pool.total_bytes()) for pool in pools if _is_managed(module, pool))
                    or None,
                }
            ],
        }

    def recognise_out_of_memory(self, error: BaseException) -> OutOfMemoryMessage | None:
        kind = type(error)
        if kind.__name__ != "OutOfMemoryError" or not kind.__module__.startswith("cupy"):
            return None
        ordinal = 0 if provider.at_most_one() else None
        return OutOfMemoryMessage(ordinal, read_requested(str(error)))


def _pools(cupy: Any) -> list[Any]:  # noqa: ANN401 CuPy is not installed where this is checked
    pools = [cupy.get_default_memory_pool()]
    find = getattr(getattr(cupy, "cuda", None), "get_allocator", None)
    current = getattr(find(), "__self__", None) if find is not None else None
    if current is not None and current != pools[0] and hasattr(current, "total_bytes"):
        pools.append(current)
    return pools


def _is_managed(cupy: Any, pool: object) -> bool:  # noqa: ANN401 the same
    allocate = getattr(getattr(cupy, "cuda", None), "malloc_managed", None)
    return allocate is not None and any(each is allocate for each in gc.get_referents(pool))


def make_provider() -> CuPy:
    return CuPy()
