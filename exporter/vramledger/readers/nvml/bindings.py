"""Import pynvml without ``ctypes.util``, which it imports and does not use: that takes 8 ms and 1.5 MiB."""

from __future__ import annotations

import sys
from types import ModuleType

_UNUSED = "ctypes.util"


def _find_library(name: str) -> str | None:
    from ctypes.util import find_library  # noqa: PLC0415 see above

    return find_library(name)


if _UNUSED in sys.modules:
    import pynvml
else:
    _placeholder = ModuleType(_UNUSED)
    _placeholder.find_library = _find_library  # type: ignore[attr-defined]
    sys.modules[_UNUSED] = _placeholder
    try:
        import pynvml
    finally:
        del sys.modules[_UNUSED]

__all__ = ["pynvml"]
