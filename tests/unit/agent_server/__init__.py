"""Tests of vramledger.agent_server that need neither process nor file of another."""
