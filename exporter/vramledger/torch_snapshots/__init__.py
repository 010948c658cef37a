"""Where memory was allocated: PyTorch's snapshot files, read safely, summed by place and compared."""
