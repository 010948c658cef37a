"""The readers of NVML over the stand-in driver."""

from tests.support.nvml_readers import open_driver, open_readers, reader

__all__ = ["open_driver", "open_readers", "reader"]
