"""A simulated host: its devices and processes, and what the driver, the exporter and Prometheus see."""
