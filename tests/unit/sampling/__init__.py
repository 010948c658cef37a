"""Tests of vramledger.sampling that need neither process nor file of another."""
