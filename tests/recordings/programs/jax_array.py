"""Make one small array with JAX; its policy (``XLA_PYTHON_CLIENT_PREALLOCATE``) decides what that takes."""

from __future__ import annotations

import importlib
import os
from typing import Any

from tests.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    keep: Any
    if gpu.rehearsing() is None:
        numpy: Any = importlib.import_module("jax.numpy")
        keep = numpy.ones((1024, 1024), dtype=numpy.float32)
        keep.block_until_ready()
    else:
        keep = gpu.open_gpu()
        keep.hold(4 * 2**20 if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == "false" else 105 * gpu.GIB)
    cue.announce("holder")
    cue.wait()
