"""A libnvidia-ml.so.1 of our own: the real pynvml and its ctypes path, no GPU, steered while it runs."""
