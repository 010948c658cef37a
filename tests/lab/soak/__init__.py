"""The effects of months, and of everything that can go wrong, on an exporter: seeded, of any length."""
