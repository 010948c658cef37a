"""Tests of accounting/holders."""
