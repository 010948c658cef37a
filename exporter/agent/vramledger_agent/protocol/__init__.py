"""Define what the agent and the exporter must agree on; both import it, and it imports nothing."""
