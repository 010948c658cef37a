"""Turn readings into a snapshot: who holds what, in which state, and for whom."""
