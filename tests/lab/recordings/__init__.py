"""Recordings of real GPUs: the planned situations, and the expected verdict of each."""
