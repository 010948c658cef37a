"""Tests on real process trees: what /proc says of them, and what is made of it."""
