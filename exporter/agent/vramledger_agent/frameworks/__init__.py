"""Read the frameworks in this process: one module for each framework."""
