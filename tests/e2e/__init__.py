"""The exporter as its user meets it: real processes, signals, HTTP, and a driver that misbehaves."""
