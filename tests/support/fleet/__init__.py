"""A fleet without a GPU: recorded hosts, multiplied and varied, for a real Prometheus to scrape."""
