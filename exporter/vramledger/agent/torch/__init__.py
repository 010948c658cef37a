"""What only PyTorch gives: its heap, its counters, recording and reclaiming."""
