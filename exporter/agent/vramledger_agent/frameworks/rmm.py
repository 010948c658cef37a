"""Read RMM in this process: how many bytes its current resource has allocated, if the program counts them.

``rmm.statistics.enable_statistics()`` replaces the current resource with one that counts. An observer must
not do that, so there are figures only if the program did it. Otherwise the report says "not supported", but
for a pool of managed memory: NVML charges it to nobody, and its size is what tells whose it is.
"""

from __future__ import annotations

from typing import Any

from vramledger_agent.frameworks.provider import OneDeviceProvider

_MAX_LAYERS = 16
"""Resources wrap each other; we search this number of them for a pool."""


class Rmm(OneDeviceProvider):
    name = "rmm"

    def read_device(self, module: Any) -> dict[str, object] | None:  # noqa: ANN401 RMM is not installed where this is checked
        layers = _layers(module)
        counted = _counts(module, layers)
        pool = next((int(each.pool_size()) for each in layers if hasattr(each, "pool_size")), None)
        managed = _is_managed(module, layers)
        if counted is None and (pool is None or not managed):
            return None
        in_use = None if counted is None else int(counted.current_bytes)
        return {
            "devices": [
                {
                    "ordinal": 0,
                    "in_use": in_use,
                    "in_use_peak": None if counted is None else int(counted.peak_bytes),
                    "pool": pool,
                    "managed": (in_use if pool is None else pool) if managed else None,
                }
            ],
        }


def _layers(rmm: Any) -> list[Any]:  # noqa: ANN401 the same
    """Return the resource of the one device, and those below it.

    RMM's functions for the current device, ``get_statistics`` among them, call CUDA (``cudaGetDevice``); this
    one looks into a dictionary.
    """
    layers = [rmm.mr.get_per_device_resource(0)]
    while len(layers) < _MAX_LAYERS and (below := getattr(layers[-1], "upstream_mr", None)) is not None:
        layers.append(below)
    return layers


def _counts(rmm: Any, layers: list[Any]) -> Any:  # noqa: ANN401 the same
    """Return what the program counts, None where it does not, or its RMM is older than 24.06."""
    kind = getattr(rmm.mr, "StatisticsResourceAdaptor", None)
    counts = layers[0].allocation_counts if kind is not None and isinstance(layers[0], kind) else None
    return counts if hasattr(counts, "current_bytes") else None


def _is_managed(rmm: Any, layers: list[Any]) -> bool:  # noqa: ANN401 the same
    """Tell whether all memory comes from ``cudaMallocManaged``: a resource of bins may have other sources."""
    managed = getattr(rmm.mr, "ManagedMemoryResource", None)
    return type(layers[-1]) is managed and not any(hasattr(each, "bin_mrs") for each in layers)


def make_provider() -> Rmm:
    return Rmm()
