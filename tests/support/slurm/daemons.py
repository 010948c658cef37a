"""Processes of root with the names and titles of Slurm's daemons, which is all that others see of them."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.requirements import require_root, require_tool


@contextmanager
def step_daemon(job: int, step: str = "batch") -> Iterator[int]:
    """Run a process with the name and the title of a step's daemon; give its pid."""
    with _daemon("slurmstepd", f"slurmstepd: [{job}.{step}]") as pid:
        yield pid


@contextmanager
def node_daemon() -> Iterator[None]:
    """Run a process with the name of slurmd."""
    with _daemon("slurmd", "/usr/sbin/slurmd"):
        yield


@contextmanager
def _daemon(name: str, title: str) -> Iterator[int]:
    require_root()
    with tempfile.TemporaryDirectory() as place:
        program = shutil.copy(require_tool("sleep"), Path(place, name))
        process = subprocess.Popen([title, "600"], executable=program)
        try:
            yield process.pid
        finally:
            process.kill()
            process.wait()
