"""Tests of the readers of NVML."""
