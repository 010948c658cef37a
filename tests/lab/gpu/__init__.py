"""Proofs that need a real GPU, which CI does not have: ``python -m tests.lab.gpu.agent --out DIR``."""
