"""Run the child process that reads, its supervisor and their protocol; and handle readings as recordings."""
