"""Serve the exporter's data over HTTP."""
