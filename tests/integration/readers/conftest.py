"""Fixtures for the readers: of NVML over the stand-in driver, and of /proc, also without rights."""

from tests.support.nvml_readers import device, open_driver, open_readers, reader
from tests.support.procs import as_nobody, hidden_proc, host, proc

__all__ = ["as_nobody", "device", "hidden_proc", "host", "open_driver", "open_readers", "proc", "reader"]
