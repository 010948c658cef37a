"""Tests of vramledger.accounting that need neither process nor file of another."""
