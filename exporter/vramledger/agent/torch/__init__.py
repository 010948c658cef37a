"""Read and do what only PyTorch has: counters and blocks, steps, memory history and reclaiming."""
