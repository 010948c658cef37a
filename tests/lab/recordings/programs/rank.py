"""A rank as torchrun starts it: holds memory on the device of its LOCAL_RANK."""

from __future__ import annotations

import importlib
import os

from tests.lab.recordings.programs import gpu
from tests.lab.recordings.programs.holder import hold

if __name__ == "__main__":
    LOCAL_RANK = int(os.environ["LOCAL_RANK"])
    importlib.import_module("torch.distributed").init_process_group(
        "gloo"
    )  # it meets the others at torchrun's store
    hold(f"rank-{LOCAL_RANK}", gpu.GIB, LOCAL_RANK, "torch", silent=True)
