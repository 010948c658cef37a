"""Define the Grafana dashboards as Python: one module for each; ``make dashboards`` writes the JSON."""
