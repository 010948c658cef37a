"""Serve the agents' socket: who connects, and what they may request."""
