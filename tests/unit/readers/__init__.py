"""Tests of vramledger.readers that need neither process nor file of another."""
