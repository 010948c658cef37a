"""The dashboards: what Grafana expects of their files, and a real Prometheus' answer to every query."""
