"""The main faults as real programs side by side, in minutes: for the alerts, stretched in time.

On one card: gradients kept, outputs of evaluations kept, a cache without a limit, fragments, and beside them
sequences of any length, which only look like a leak. On the other: most of it preallocated by JAX, an
idle notebook, orphans, and memory that the driver books on nobody. ``tests/support/faults`` plays the
recording thirty times slower.
"""

from __future__ import annotations

import gzip
import os
import time
from pathlib import Path

from tests.lab.recordings.scenarios import Scenario
from tests.lab.recordings.stage import Stage
from tests.support import judging
from tests.support.faults.recorded import FAULTS as RECORDING
from tests.support.faults.recorded import STRETCH

LASTING = 245.0
"""Seconds of the recording: two hours, stretched."""

ON_THE_FIRST = ("gradients", "evaluations", "cache", "lengths", "fragments")
SESSION = "/home/ada/experiment.ipynb"


def faults(stage: Stage) -> None:
    """Start them all, and let them run."""
    scale = 0.1 if stage.rehearsing else 1.0
    notes = stage.scratch / "notes-of-torch"
    notes.mkdir(exist_ok=True)
    recorder = stage.record(
        RECORDING,
        "leaks, a cache, fragments, preallocation, a notebook, orphans, bytes of nobody: all at once",
        idle_after=600 / STRETCH * scale, unattributed_below=None,
    )  # fmt: skip
    begun = time.monotonic()

    def at(second: float) -> None:
        recorder.until(
            f"second {second}",
            lambda _: time.monotonic() - begun >= second * scale,
            timeout=second * scale + 10,
        )

    def visible(device: int) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": str(device), "VRAMLEDGER_NOTES": str(notes)}

    lasting = 200 * scale
    first = [(name, stage.start("faulty.py", name, lasting, env=visible(0))) for name in ON_THE_FIRST]
    greedy = stage.start("jax_array.py", "preallocated", env={"CUDA_VISIBLE_DEVICES": "1"})
    notebook = stage.hold("notebook", 10, "--device", 1, env={"JPY_SESSION_NAME": SESSION})
    launcher = stage.start(
        "launcher.py", "--how", "spawn", "--devices", "1,1", "--gib", "3", preexec_fn=os.setpgrp
    )
    managed = stage.start("managed.py", "10", "1")
    roles = {
        **launcher.wait_for("worker-1", "worker-2", timeout=90),
        **notebook.wait_for("notebook"),
        **managed.wait_for("holder", timeout=90),
        **greedy.wait_for("preallocated", timeout=90),
        **{role: pid for name, each in first for role, pid in each.wait_for(name, timeout=90).items()},
    }
    recorder.listed(*roles.values())
    at(30)
    launcher.kill()
    at(LASTING)
    orphans = ("worker-1", "worker-2")
    # All five step twice a second and together, and no agent's counters are recorded: whom of them the driver
    # names at the end is chance.
    seen = judging.states(recorder.snapshot) if recorder.snapshot is not None else {}
    expected = {
        **{name: seen.get(roles[name], "idle") for name in ON_THE_FIRST},
        **dict.fromkeys(orphans, "orphaned"), **dict.fromkeys(("notebook", "holder", "preallocated"), "idle"),
    }  # fmt: skip
    stage.finish(recorder, roles, expected)
    _gather(notes, stage.home / f"{RECORDING}.notes.gz")


def _gather(notes: Path, target: Path) -> None:
    """Put the notes of all programs into one file beside the recording."""
    lines = [line for path in sorted(notes.glob("*.jsonl")) for line in path.read_text().splitlines()]
    text = "".join(f"{line}\n" for line in lines)
    target.write_bytes(gzip.compress(text.encode(), mtime=0))


FAULTS = Scenario(RECORDING, faults, seconds=300.0)
