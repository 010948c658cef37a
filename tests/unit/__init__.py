"""Tests of single modules, from values to values."""
