"""Proofs that need a real GPU, which CI does not have: ``python -m tests.tools.gpu.agent --out DIR``."""
