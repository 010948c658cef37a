"""A simulated fleet that real engines scrape."""
