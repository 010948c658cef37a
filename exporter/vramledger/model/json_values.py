"""Define the values of the JSON documents, and their version."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

JSON_VERSION = 2
"""The version of the documents of the ledger and the history; a change that breaks readers changes it."""
