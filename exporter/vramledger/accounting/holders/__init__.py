"""Keep who holds what, and say why."""
