"""Tests of vramledger.commands that need neither process nor file of another."""
