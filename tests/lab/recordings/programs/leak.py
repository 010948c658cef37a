"""A program that forgets to free memory: it grows slowly, and works all the time."""

from __future__ import annotations

import time

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = gpu.open_gpu(1)
    card.hold(4 * gpu.GIB)
    cue.announce("leak")
    for _ in range(300):
        card.hold(96 * 2**20)
        card.work(0.05)
        time.sleep(0.95)
    cue.wait()
