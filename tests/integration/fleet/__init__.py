"""A fleet behind real engines."""
