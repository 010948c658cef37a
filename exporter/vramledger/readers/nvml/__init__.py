"""Read GPUs: the driver library, and what it reports of each GPU."""
