"""Tests of parts together, or of one with something real: a process, a socket, a driver, a tool."""
