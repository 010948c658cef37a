"""Reservations of schedulers, read from real sockets, cgroups and processes."""
