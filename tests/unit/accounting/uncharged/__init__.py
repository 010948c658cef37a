"""Tests of accounting/uncharged."""
