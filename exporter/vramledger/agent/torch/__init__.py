"""What only PyTorch has: counters and blocks, optimizer steps, memory history and reclaiming."""
