"""A training loop over a torch DataLoader with live workers; one more worker holds GPU memory itself.

The forked workers of the first loader inherit the open device files of their parent, and hold no memory.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time
from typing import Any

from tests.lab.recordings.programs import cue, gpu
from tests.lab.recordings.programs.holder import hold


class Numbers:
    """A dataset of small samples, each of which takes a moment."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        """Return a sample."""
        time.sleep(0.05)
        return index


class HeldNumbers(Numbers):
    """The same, by a worker that decodes on the GPU and so holds memory there."""

    card: gpu.Gpu | None = None

    def __getitem__(self, index: int) -> int:
        """Return a sample; take the memory with the first."""
        if self.card is None:
            cue.enter()
            self.card = gpu.open_gpu(0, "torch")
            self.card.hold(gpu.GIB)
            cue.announce("gpu-worker")
        return super().__getitem__(index)


def _read(numbers: Numbers, role: str) -> None:
    cue.enter()
    cue.announce(role)
    for index in range(len(numbers)):
        numbers[index]


def _rehearse() -> None:
    for number in (1, 2):
        fork = multiprocessing.get_context("fork")
        fork.Process(target=_read, args=(Numbers(), f"worker-{number}"), daemon=True).start()
    spawn = multiprocessing.get_context("spawn")
    spawn.Process(target=hold, args=("gpu-worker", gpu.GIB), daemon=True).start()
    cue.announce("main")
    cue.wait()


def main() -> None:
    """Load and train for ever."""
    cue.enter()
    card = gpu.open_gpu(0, "torch")
    card.hold(2 * gpu.GIB)
    card.work(0.05)
    if gpu.rehearsing() is not None:
        _rehearse()
    data: Any = importlib.import_module("torch.utils.data")
    plain = iter(data.DataLoader(Numbers(), batch_size=4, num_workers=2, persistent_workers=True))
    held = iter(
        data.DataLoader(
            HeldNumbers(),
            batch_size=4,
            num_workers=1,
            multiprocessing_context="spawn",
            persistent_workers=True,
        )
    )
    next(plain)
    next(held)
    cue.announce("main", parent=os.getppid())
    while True:
        next(plain)
        next(held)
        card.work(0.05)


if __name__ == "__main__":
    main()
