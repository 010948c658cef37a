"""A snapshot for people: table, evidence, JSON, timeline, remedies."""
