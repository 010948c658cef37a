"""The stand-in driver itself."""
