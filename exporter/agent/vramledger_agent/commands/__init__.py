"""The commands that start an agent, and read what it recorded."""
