"""The exporter's side of the agents, with real sockets and real processes."""
