"""Tests of vramledger.web that need neither process nor file of another."""
