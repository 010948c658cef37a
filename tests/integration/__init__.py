"""Tests of several parts together, or of one part with something real: a process, a socket, a tool."""
