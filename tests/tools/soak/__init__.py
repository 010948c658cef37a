"""What months do to an exporter, and what everything that can go wrong does: seeded, and as long as told."""
