"""The exporter as its user runs it: real processes, signals, HTTP, and a driver that misbehaves."""
