"""Tests of vramledger.readers.owners that need neither process nor file of another."""
