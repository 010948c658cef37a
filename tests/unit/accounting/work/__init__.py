"""Tests of accounting/work."""
