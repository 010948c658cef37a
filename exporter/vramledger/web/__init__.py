"""What the exporter serves over HTTP."""
