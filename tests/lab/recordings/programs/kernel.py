"""Become a real notebook kernel whose first cell takes memory: ``kernel.py ROLE GIB DIRECTORY``.

The kernel puts pipes of its own in the place of stdout, so the cell announces its role on a copy of ours.
"""

from __future__ import annotations

import os
import sys

from tests.lab.recordings.programs import cue

TOLD = 9
"""The number of the copy of stdout."""

CONNECTION = "kernel-0b5c8f3e-7f0e-4d4c-9a43-3f1d2c1b0a99.json"


def main() -> None:
    """Start the kernel in our place; the alarm that ends a program's life stays with the process."""
    role, gib, directory = sys.argv[1:]
    cue.enter()
    os.dup2(1, TOLD)
    cell = (
        "from tests.lab.recordings.programs import cue, gpu",
        "card = gpu.open_gpu(0, 'torch')",
        f"card.hold(int({float(gib)} * gpu.GIB))",
        f"__import__('os').dup2({TOLD}, 1)",
        f"cue.announce({role!r})",
    )
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", f"{directory}/{CONNECTION}"]
    os.execv(sys.executable, [*command, f"--IPKernelApp.exec_lines={list(cell)!r}"])  # noqa: S606 no shell


if __name__ == "__main__":
    main()
