"""Tests of the repository itself: its layers, its packages, its hygiene."""
