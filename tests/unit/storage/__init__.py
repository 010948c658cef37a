"""Tests of the storage, from values to values and in one directory."""
