"""Tests of vramledger.views that need neither process nor file of another."""
