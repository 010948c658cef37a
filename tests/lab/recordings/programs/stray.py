"""Put a tensor on the second GPU and synchronise without naming a device: a context on the first as well."""

from __future__ import annotations

import importlib
from typing import Any

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    keep: list[Any] = [gpu.open_gpu(1, "torch")]
    keep[0].hold(2 * gpu.GIB)
    if gpu.rehearsing() is None:
        torch: Any = importlib.import_module("torch")
        torch.cuda.synchronize()
    else:
        keep.append(gpu.open_gpu(0))
    cue.announce("holder")
    cue.wait()
