"""Readings in, snapshot out: who holds what, in which state, and for whom."""
