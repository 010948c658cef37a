"""The readers of a host, on real files and the stand-in driver."""
