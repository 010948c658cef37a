"""Share device memory by CUDA IPC: a producer takes and shares it, a consumer opens it by its handle."""

from __future__ import annotations

import sys
from typing import cast

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = cast("gpu.Cuda", gpu.open_gpu())
    if len(sys.argv) > 1:
        card.open_shared(sys.argv[1])
        cue.announce("consumer")
    else:
        card.hold(8 * gpu.GIB)
        cue.announce("producer", handle=card.share())
    cue.wait()
