"""Diagnose a failed allocation and report the verdict."""
