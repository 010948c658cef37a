"""Small real programs that hold GPU memory in every relevant way."""
