"""What reads a host, tried on real files and on the stand-in driver."""
