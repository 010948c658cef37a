"""Hold managed memory that is on the card: NVML charges it to no process.

The arguments are GiB, 1 unless told otherwise, and the device.
"""

from __future__ import annotations

import sys
from typing import cast

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = cast("gpu.Cuda", gpu.open_gpu(int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    card.hold_managed((int(sys.argv[1]) if len(sys.argv) > 1 else 1) * gpu.GIB)
    cue.announce("holder")
    cue.wait()
