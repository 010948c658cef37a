"""GPUs: the driver library, the process that reads it, and recordings of it."""
