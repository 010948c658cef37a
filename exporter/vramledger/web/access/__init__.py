"""Decide who may use the web server: TLS, passwords and rates, from a file in exporter-toolkit's format."""
