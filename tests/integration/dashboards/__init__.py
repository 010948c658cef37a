"""The dashboards: what Grafana expects of their files, and what a real Prometheus answers to every query."""
