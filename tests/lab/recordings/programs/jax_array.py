"""Make one small array with JAX; its environment (``XLA_PYTHON_CLIENT_…``) decides what that takes.

The argument is the program's role.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    keep: Any
    if gpu.rehearsing() is None:
        numpy: Any = importlib.import_module("jax.numpy")
        keep = numpy.ones((1024, 1024), dtype=numpy.float32)
        keep.block_until_ready()
    else:
        keep = gpu.open_gpu(int(os.environ.get("CUDA_VISIBLE_DEVICES", "0")), framework="jax")
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        keep.hold(
            4 * 2**20
            if os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == "false"
            else int(share * 140 * gpu.GIB)
        )
    cue.announce(sys.argv[1] if len(sys.argv) > 1 else "holder")
    cue.wait()
