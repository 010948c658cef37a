"""Who may use the web server: TLS, passwords and rates, from a file in the exporter-toolkit's format."""
