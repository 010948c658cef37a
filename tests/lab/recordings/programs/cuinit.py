"""Initialise CUDA and make no context: the device files are open, and NVML lists nothing."""

from __future__ import annotations

import ctypes

from tests.lab.recordings.programs import cue, gpu

if __name__ == "__main__":
    cue.enter()
    if gpu.rehearsing() is None and (code := ctypes.CDLL("libcuda.so.1").cuInit(0)):
        message = f"cuInit: error {code}"
        raise SystemExit(message)
    cue.announce("hidden")
    cue.wait()
