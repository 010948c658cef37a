"""Start workers that hold memory, and live until killed: what leaves orphans behind.

``subprocess`` and ``ranks`` start programs (ranks lead sessions of their own and carry torchrun's
environment), ``spawn`` and ``fork`` are multiprocessing's. A launcher itself never touches CUDA: after
that a fork could not use it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lab.recordings.programs import cue, gpu
from tests.lab.recordings.programs.holder import hold

HOLDER = Path(__file__).with_name("holder.py")


def main() -> None:
    """Start the workers, say so, wait."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=["subprocess", "spawn", "fork", "ranks"], required=True)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--devices", default="0,0", help="a worker for each of these")
    parser.add_argument("--busy", action="store_true")
    args = parser.parse_args()
    cue.enter()
    cue.announce("launcher")
    for number, device in enumerate(args.devices.split(","), start=1):
        role = f"worker-{number}"
        if args.how in ("subprocess", "ranks"):
            command = [
                sys.executable,
                str(HOLDER),
                "--role",
                role,
                "--gib",
                str(args.gib),
                "--device",
                device,
                "--silent",
            ]
            command += ["--busy"] if args.busy else []
            rank = {"LOCAL_RANK": str(number - 1), "RANK": str(number - 1), "TORCHELASTIC_RUN_ID": "none"}
            ranks = args.how == "ranks"
            subprocess.Popen(
                command, start_new_session=ranks, env={**os.environ, **(rank if ranks else {})}
            )  # lives on without us: that is the point
        else:
            context: Any = multiprocessing.get_context(args.how)
            size = int(args.gib * gpu.GIB)
            context.Process(
                target=hold, args=(role, size, int(device)), kwargs={"busy": args.busy, "silent": True}
            ).start()
    cue.wait()


if __name__ == "__main__":
    main()
