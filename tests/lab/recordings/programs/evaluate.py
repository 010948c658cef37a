"""An evaluation that ends after a while and frees everything."""

from __future__ import annotations

import sys

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = gpu.open_gpu(0)
    card.hold(10 * gpu.GIB)
    cue.announce("evaluate")
    card.work(float(sys.argv[1]))
