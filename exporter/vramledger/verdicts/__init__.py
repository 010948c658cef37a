"""What a snapshot means: is a device clean for the next job, and what to do about a holding."""
