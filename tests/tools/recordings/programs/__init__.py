"""Small real programs that hold GPU memory in every way that matters."""
