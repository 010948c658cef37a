"""What deploys the exporter: every file is read by the program that will read it."""
