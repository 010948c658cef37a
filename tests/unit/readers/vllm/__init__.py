"""Tests of vramledger.readers.vllm that need no process."""
