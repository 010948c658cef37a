"""Programs with the usual faults of people's programs, on torch: fast, so that hours take minutes.

The first argument is the fault, the second for how many seconds it goes on. What torch itself says of its
allocator goes, a line each half second, into a file that ``VRAMLEDGER_NOTES`` names the directory of: a
recording has only what NVML and /proc say.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.lab.recordings.programs import cue, gpu

MIB = 2**20
TICK = 0.5
"""Seconds between two steps of a program."""

FIGURES = {
    "torch_reserved_bytes": "reserved_bytes.all.current",
    "torch_allocated_bytes": "allocated_bytes.all.current",
    "torch_active_bytes": "active_bytes.all.current",
    "torch_requested_bytes": "requested_bytes.all.current",
    "torch_inactive_split_bytes": "inactive_split_bytes.all.current",
    "torch_reserved_peak_bytes": "reserved_bytes.all.peak",
    "torch_allocated_peak_bytes": "allocated_bytes.all.peak",
    "torch_alloc_retries_total": "num_alloc_retries",
    "torch_ooms_total": "num_ooms",
}


class Model:
    """Some layers on the first device that is visible, and a step of their training."""

    def __init__(self, layers: int = 4) -> None:
        self.torch: Any = importlib.import_module("torch")
        nn = self.torch.nn
        blocks = [part for _ in range(layers) for part in (nn.Linear(2048, 2048), nn.ReLU())]
        self.net = nn.Sequential(*blocks).cuda()
        self.optimizer = self.torch.optim.SGD(self.net.parameters(), lr=1e-6)

    def batch(self, rows: int) -> Any:  # noqa: ANN401 torch has no types here
        """Return the outputs for a random batch, with their graph."""
        return self.net(self.torch.randn(rows, 2048, device="cuda"))

    def step(self, rows: int) -> None:
        """Train once, in the ordinary way."""
        self.optimizer.zero_grad(set_to_none=True)
        self.batch(rows).square().mean().backward()
        self.optimizer.step()


def gradients(card: Model) -> Iterator[None]:
    """Keep the gradients of every iteration: 64 MiB each."""
    kept = []
    while True:
        card.step(8192)
        loss = card.batch(8192).square().mean()
        kept.append(card.torch.autograd.grad(loss, list(card.net.parameters())))
        yield


def evaluations(card: Model) -> Iterator[None]:
    """Keep the outputs of each evaluation, which without no_grad is their whole graph."""
    kept = []
    for step in range(1_000_000):
        card.step(8192)
        if step % 20 == 0:
            kept.append([card.batch(8192) for _ in range(3)])
        yield


def cache(card: Model) -> Iterator[None]:
    """Remember the result of every request for ever: 40 MiB each."""
    results = {}
    for request in range(1_000_000):
        with card.torch.no_grad():
            results[request] = card.batch(5120)
        yield


def lengths(card: Model) -> Iterator[None]:
    """Train on batches of any length: nothing is wrong, although reserved memory climbs."""
    chance = random.Random(7)  # noqa: S311 it is chance for tests
    while True:
        for _ in range(4):
            card.step(int(2_000 + 90_000 * chance.betavariate(1.2, 4)))
        yield


def fragments(card: Model) -> Iterator[None]:
    """Free every other block of segments that hold two: larger blocks cannot use the free halves."""
    blocks = [card.torch.empty(9 * MIB, dtype=card.torch.uint8, device="cuda") for _ in range(1200)]
    kept = blocks[::2]
    del blocks
    while kept:
        card.step(4096)
        yield


FAULTS: dict[str, Callable[[Model], Iterator[None]]] = {
    fault.__name__: fault for fault in (gradients, evaluations, cache, lengths, fragments)
}

# MiB more a step, for a rehearsal: at first, and with every step.
_PRETENDED = {
    "gradients": (600, 64), "evaluations": (600, 20), "cache": (200, 40), "lengths": (600, 0),
    "fragments": (12_000, 0),
}  # fmt: skip


def _rehearse(fault: str, seconds: float) -> None:
    card = gpu.open_gpu(int(os.environ.get("CUDA_VISIBLE_DEVICES", "0")), "torch")
    first, more = _PRETENDED[fault]
    card.hold(first * MIB)
    held = first * MIB
    cue.announce(fault)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if more:
            card.hold(more * MIB)
            held += more * MIB
        card.work(TICK / 10)
        _note(dict.fromkeys(FIGURES, 0) | {"torch_reserved_bytes": held, "torch_allocated_bytes": held})


def _note(figures: dict[str, int]) -> None:
    line = json.dumps({"time": time.time(), "pid": os.getpid(), "figures": figures}) + "\n"
    with Path(os.environ["VRAMLEDGER_NOTES"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(line)


def main(fault: str, seconds: float) -> None:
    """Run the fault for this time, then keep the memory and work a little."""
    cue.enter()
    if gpu.rehearsing() is not None:
        _rehearse(fault, seconds)
        cue.wait()
    card = Model()
    steps = FAULTS[fault](card)
    next(steps)
    cue.announce(fault)
    end = time.monotonic() + seconds
    while True:
        begun = time.monotonic()
        if begun < end:
            next(steps)
        else:
            card.step(1024)
        card.torch.cuda.synchronize()
        stats = card.torch.cuda.memory_stats()
        _note({name: int(stats.get(key, 0)) for name, key in FIGURES.items()})
        time.sleep(max(0.0, begun + TICK - time.monotonic()))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
