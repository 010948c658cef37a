"""Integrate what a driver's processes hold, without code of vramledger: plain pynvml, every 20 ms.

Answers each line of standard input with a line of JSON: ``byte_seconds`` of all devices since the start, and
``holders``, the bytes of each pid that the newest reading lists.
"""

from __future__ import annotations

import json
import select
import sys
import time
from typing import Any

import pynvml

PACE = 0.02


def holders(devices: list[Any]) -> dict[int, int]:
    """Return the bytes of each pid, on all devices together."""
    found: dict[int, int] = {}
    for device in devices:
        for entry in pynvml.nvmlDeviceGetComputeRunningProcesses(device):
            found[entry.pid] = found.get(entry.pid, 0) + (entry.usedGpuMemory or 0)
    return found


def main() -> None:
    """Read until the input ends."""
    pynvml.nvmlInit()
    devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    total, since, held = 0.0, time.monotonic(), holders(devices)
    while True:
        asked = bool(select.select([sys.stdin], [], [], PACE)[0])
        now, new = time.monotonic(), holders(devices)
        # Half of the span each: on average a change is in the middle of it.
        total += (now - since) * (sum(held.values()) + sum(new.values())) / 2
        since, held = now, new
        if asked:
            if not sys.stdin.readline():
                return
            print(json.dumps({"byte_seconds": total, "holders": held}), flush=True)


if __name__ == "__main__":
    main()
