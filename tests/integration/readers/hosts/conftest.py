"""The tests of what reads /proc have a directory that looks like it, and users who may not read all."""

from __future__ import annotations

from tests.support.procs import as_nobody, hidden_proc, host, proc

__all__ = ["as_nobody", "hidden_proc", "host", "proc"]
