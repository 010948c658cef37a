"""Tests of vramledger.metrics that need neither process nor file of another."""
