"""An inference server: a model in memory, bursts of requests, pauses in between."""

from __future__ import annotations

import time

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = gpu.open_gpu(1)
    card.hold(24 * gpu.GIB)
    cue.announce("answer")
    while True:
        card.work(4.0)
        time.sleep(9.0)
