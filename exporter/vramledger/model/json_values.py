"""Define the values of the JSON documents, and their version."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

JSON_VERSION = 2
"""The version of the ledger's and the history's document: it changes with a change that breaks a reader."""
