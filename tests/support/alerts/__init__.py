"""Nodes for the rules, and promtool, which evaluates them."""
