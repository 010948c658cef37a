"""Find who has what NVML charges to no process."""
