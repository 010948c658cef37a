"""What Python imports at its start, to profile the exporter's processes."""
