"""GPUs: the driver library, and what it says of each."""
