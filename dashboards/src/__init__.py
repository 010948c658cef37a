"""The Grafana dashboards as Python: a module a dashboard, written to JSON by ``make dashboards``."""
