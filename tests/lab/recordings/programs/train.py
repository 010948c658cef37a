"""A busy training whose memory goes up and down: activations come with each step and go after it."""

from __future__ import annotations

import itertools

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    card = gpu.open_gpu(0)
    card.hold(18 * gpu.GIB)
    cue.announce("train")
    for step in itertools.count():
        layers = 4 + step % 3
        for _ in range(layers):
            card.hold(3 * gpu.GIB)
            card.work(0.4)
        for _ in range(layers):
            card.drop()
            card.work(0.15)
