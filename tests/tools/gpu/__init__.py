"""What only a real GPU can prove; CI has none: ``python -m tests.tools.gpu.agent --out DIR``."""
