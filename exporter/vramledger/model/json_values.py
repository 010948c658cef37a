"""What a JSON document is made of, for the modules that write one."""

from __future__ import annotations

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
