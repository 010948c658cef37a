"""One module for each framework: what the agent reads from it, and how."""
