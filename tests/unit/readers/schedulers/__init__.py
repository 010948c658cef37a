"""Tests of the schedulers' readers, from values to values."""
