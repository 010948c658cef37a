"""Do what only PyTorch allows: read its counters, blocks, steps and memory history, and free memory."""
