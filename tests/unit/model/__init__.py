"""Tests of vramledger.model that need neither process nor file of another."""
