"""A rank as torchrun starts it: holds memory on the device of its LOCAL_RANK."""

from __future__ import annotations

import os

from tests.lab.recordings.programs import gpu
from tests.lab.recordings.programs.holder import hold

if __name__ == "__main__":
    LOCAL_RANK = int(os.environ["LOCAL_RANK"])
    hold(f"rank-{LOCAL_RANK}", gpu.GIB, LOCAL_RANK, "torch")
