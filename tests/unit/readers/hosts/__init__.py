"""Raw facts of processes, from values to values."""
