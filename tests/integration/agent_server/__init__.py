"""The exporter's side of the agents' socket, with real sockets and real processes."""
