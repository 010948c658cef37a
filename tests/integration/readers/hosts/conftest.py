"""Fixtures for the readers of /proc: a directory that looks like it, and users without rights."""

from tests.support.procs import as_nobody, hidden_proc, host, proc

__all__ = ["as_nobody", "hidden_proc", "host", "proc"]
