"""The effects of everything that can go wrong on an exporter: seeded, of any length."""
