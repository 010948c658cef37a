"""Watch the GPUs only through NVML, like any monitor: device files are open, no memory is held."""

from __future__ import annotations

import ctypes

from tests.lab.recordings.programs import cue

if __name__ == "__main__":
    cue.enter()
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.nvmlInit_v2()
    count = ctypes.c_uint()
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(ctypes.c_void_p()))
    cue.announce("monitor", code=code)
    cue.wait()
