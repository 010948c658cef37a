"""What the JSON documents are made of, and their version."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

JSON_VERSION = 2
"""Of the ledger's and the history's document: a change that breaks a reader makes the next."""
