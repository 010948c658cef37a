"""Read RMM in this process: how many bytes its current resource has allocated, if the program counts them.

``rmm.statistics.enable_statistics()`` replaces the current resource with one that counts. An observer must
not do that, so there are figures only if the program did it. Otherwise the report says "not supported".
"""

from __future__ import annotations

import sys

from vramledger.agent import visible_devices
from vramledger.agent.frameworks.provider import Provider

_MAX_LAYERS = 16
"""Resources wrap each other; we search this number of them for a pool."""


class Rmm(Provider):
    """The RMM of this process."""

    name = "rmm"

    def may_initialise(self) -> bool:
        """Return whether there is a GPU; :meth:`is_initialised` is too slow to ask it at each import."""
        return visible_devices.may_exist()

    def is_initialised(self) -> bool:
        """Return whether RMM is loaded and CUDA in use."""
        return "rmm" in sys.modules and visible_devices.has_open_device()

    def read(self) -> dict[str, object] | None:
        """Return bytes in use, their peak, and the pool's size where a pool is part of the resource."""
        rmm = sys.modules.get("rmm")
        if rmm is None:
            return None
        entry: dict[str, object] = {"framework": self.name, "version": getattr(rmm, "__version__", None)}
        statistics = sys.modules.get("rmm.statistics")
        counted = None
        if statistics is not None and visible_devices.at_most_one():
            counted = statistics.get_statistics()
        if counted is None:
            return {**entry, "supported": False, "devices": []}
        return {
            **entry,
            "supported": True,
            "devices": [
                {
                    "ordinal": 0,
                    "in_use": int(counted.current_bytes),
                    "in_use_peak": int(counted.peak_bytes),
                    "pool": _pool_bytes(rmm),
                }
            ],
        }


def _pool_bytes(rmm: object) -> int | None:
    """Return the size of the pool below the current resource; None if there is no pool."""
    resource = rmm.mr.get_current_device_resource()  # type: ignore[attr-defined]
    for _ in range(_MAX_LAYERS):
        if hasattr(resource, "pool_size"):
            return int(resource.pool_size())
        resource = getattr(resource, "upstream_mr", None)
        if resource is None:
            return None
    return None


def make_provider() -> Rmm:
    """Make the provider."""
    return Rmm()
