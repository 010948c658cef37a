"""Show where memory was allocated: PyTorch's snapshot files, read safely, summed by site and compared."""
