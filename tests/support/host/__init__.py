"""A simulated host: what there is on it, and what the driver, the exporter and Prometheus see of it."""
