"""vramledger: a ledger for GPU memory."""

from vramledger_agent import __version__

__all__ = ["__version__"]
