"""Tests of vramledger.agent that need neither process nor file of another."""
