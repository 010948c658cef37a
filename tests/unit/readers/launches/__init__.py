"""Reading a library's functions, and their names."""
