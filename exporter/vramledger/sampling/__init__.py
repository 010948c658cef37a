"""The child process that reads, its supervisor and their protocol; and readings as recordings."""
