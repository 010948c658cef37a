"""A short, seeded run of every part of the soak."""
