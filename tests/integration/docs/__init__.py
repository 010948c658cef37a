"""The documents that are made from the code: they are up to date, complete, and their queries work."""
