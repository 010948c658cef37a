"""The rules, the routes and the runbooks, with the real promtool, Prometheus and Alertmanager."""
