"""Nodes for the dashboards, and a real Prometheus that answers their queries."""
