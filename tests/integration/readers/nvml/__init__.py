"""Tests of what reads NVML and carries the readings on."""
