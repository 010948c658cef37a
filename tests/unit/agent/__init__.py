"""Tests of vramledger_agent that need neither process nor file of another."""
