"""What only a real GPU can prove; run by hand, for CI has none: ``python -m tests.gpu.agent --out DIR``."""
