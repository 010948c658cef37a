"""The documents that are generated from the code: up to date, complete, with queries that work."""
