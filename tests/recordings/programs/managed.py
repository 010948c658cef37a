"""Hold 1 GiB of managed memory that lies on the card: NVML books it on nobody."""

from __future__ import annotations

from typing import cast

from tests.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = cast("gpu.Cuda", gpu.open_gpu())
    card.hold_managed(gpu.GIB)
    cue.announce("holder")
    cue.wait()
