"""The tests of what reads NVML have the stand-in driver."""

from __future__ import annotations

from tests.support.nvml_readers import open_readers, reader
from tests.support.standin.plugin import standin, standin_directory, standin_here, standin_library

__all__ = ["open_readers", "reader", "standin", "standin_directory", "standin_here", "standin_library"]
