"""Our own libnvidia-ml.so.1, for the real pynvml and its ctypes: no GPU, controlled while it runs."""
