"""What schedulers reserve, read from real sockets, cgroups and processes."""
