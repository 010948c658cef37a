"""The exporter's side of the agents: their socket, who they are, what they may ask."""
