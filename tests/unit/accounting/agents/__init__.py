"""Tests of accounting/agents."""
