"""Read CuPy's default pool in this process.

The pool answers for the calling thread's current device, so it is read only where there can be only one
device.
"""

from __future__ import annotations

import sys

from vramledger.agent import visible_devices
from vramledger.agent.frameworks.provider import Provider


class CuPy(Provider):
    """The CuPy of this process."""

    name = "cupy"

    def may_initialise(self) -> bool:
        """Return whether there is a GPU; :meth:`is_initialised` is too slow to ask it at each import."""
        return visible_devices.may_exist()

    def is_initialised(self) -> bool:
        """Return whether CuPy is loaded and CUDA in use."""
        return "cupy" in sys.modules and visible_devices.has_open_device()

    def read(self) -> dict[str, object] | None:
        """Return the default pool's bytes in use, its size, and the limit if one was set."""
        cupy = sys.modules.get("cupy")
        if cupy is None:
            return None
        entry: dict[str, object] = {"framework": self.name, "version": getattr(cupy, "__version__", None)}
        if not visible_devices.at_most_one():
            return {**entry, "supported": False, "devices": []}
        pool = cupy.get_default_memory_pool()
        return {
            **entry,
            "supported": True,
            "allocator": "pool",
            "policy": "caching",
            "devices": [
                {
                    "ordinal": 0,
                    "in_use": int(pool.used_bytes()),
                    "pool": int(pool.total_bytes()),
                    "limit": int(pool.get_limit()) or None,  # 0 means none
                }
            ],
        }


def make_provider() -> CuPy:
    """Make the provider."""
    return CuPy()
