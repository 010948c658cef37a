"""Counting launches: real uprobes in real programs."""
