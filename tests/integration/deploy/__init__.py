"""The files that deploy the exporter: the program that each is for reads it."""
