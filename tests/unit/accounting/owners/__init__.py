"""Tests of accounting/owners."""
