"""The ledger of the past: readings and the accounting's state on disk, and what is read back from them."""
