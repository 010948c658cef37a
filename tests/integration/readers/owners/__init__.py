"""Owners of real processes."""
