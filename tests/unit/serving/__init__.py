"""Tests of vramledger.serving that need neither process nor file of another."""
