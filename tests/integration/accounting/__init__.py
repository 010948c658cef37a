"""States and policies of real processes."""
