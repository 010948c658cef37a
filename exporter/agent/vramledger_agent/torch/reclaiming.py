"""Handle ``vramledger reclaim``: free what PyTorch has cached, between two steps of the program.

First the collector runs, then the cache is emptied: the memory of tensors in dead reference cycles becomes
cache only once the collector has freed them. Both run on the program's own thread, where its finalizers
expect to run and no kernel launch is half done. The next steps have to allocate from the driver again.
"""

from __future__ import annotations

import gc
import time
from types import ModuleType
from typing import TYPE_CHECKING

from vramledger_agent import step_boundary
from vramledger_agent.torch.memory_history import MAX_SECONDS, initialised_torch

if TYPE_CHECKING:
    from vramledger_agent.requests import Request


def reclaim(request: Request) -> dict[str, object]:
    """Run both at the end of a step, awaited for ``seconds``; return each device's bytes before and after.

    Raises RuntimeError if PyTorch is not in use or captures a graph, TimeoutError without a step or
    ``safe_point``.
    """
    seconds = request.number("seconds", 30.0, MAX_SECONDS)
    torch = initialised_torch()
    try:
        result = step_boundary.run(lambda: _empty_cache(torch), seconds)
    except TimeoutError:
        message = (
            f"no training step ended within {seconds:g} s; a program that does not train calls"
            " vramledger_agent.safe_point() where it can pause"
        )
        raise TimeoutError(message) from None
    assert isinstance(result, dict)  # noqa: S101 _empty_cache returned it
    return result


def _empty_cache(torch: ModuleType) -> dict[str, object]:
    # This is the program's own thread, which may call the runtime; our thread may not.
    if torch.cuda.is_current_stream_capturing():
        message = "the program captures a CUDA graph at this moment; try again"
        raise RuntimeError(message)
    started = time.monotonic()
    before = _read_reserved_and_allocated(torch)
    collected = gc.collect()
    torch.cuda.empty_cache()
    after = _read_reserved_and_allocated(torch)
    return {
        "devices": [
            {
                "ordinal": ordinal,
                "reserved_before": before[ordinal][0],
                "reserved_after": after[ordinal][0],
                "allocated_before": before[ordinal][1],
                "allocated_after": after[ordinal][1],
            }
            for ordinal in sorted(before.keys() & after.keys())
            if before[ordinal][0]
        ],
        "collected": collected,
        "paused": time.monotonic() - started,
    }


def _read_reserved_and_allocated(torch: ModuleType) -> dict[int, tuple[int, int]]:
    """Return reserved and allocated bytes of every device that counts them."""
    found = {}
    for ordinal in range(torch.cuda.device_count()):
        try:
            stats = torch._C._cuda_memoryStats(ordinal)
            found[ordinal] = (
                stats["reserved_bytes"]["all"]["current"],
                stats["allocated_bytes"]["all"]["current"],
            )
        except (RuntimeError, KeyError):  # a pluggable allocator counts nothing
            continue
    return found
