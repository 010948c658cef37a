"""Show a snapshot to people: table, evidence, JSON, timeline, remedies."""
