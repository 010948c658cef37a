"""Reading, summing and showing PyTorch's allocation snapshots."""
