"""Process trees by subject; each says what it is, whether it is healthy, and what must be said of it."""
