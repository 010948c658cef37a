"""Tests of vramledger.readers.vllm with real processes."""
