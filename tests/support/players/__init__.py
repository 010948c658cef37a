"""Real processes for tests and tools: one program that obeys, and the trees that are made of it."""
