"""The agent's figures for a program that has a Prometheus registry of its own.

The program brings prometheus_client; the agent does not depend on it, so it is imported by name, when the
program makes a collector. The families carry the exporter's names and values, with the framework's own
number of the device instead of a UUID, which a process does not know without asking CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from vramledger.agent.worker import worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GAUGES = {
    "reserved": "Bytes that PyTorch's allocator has reserved on the device.",
    "allocated": "Bytes in the program's tensors.",
    "active": "Bytes in use or waiting for another stream.",
    "requested": "Bytes that the program asked for, before rounding.",
    "inactive_split": "Bytes in free pieces of segments that are partly in use.",
    "reserved_peak": "Highest reserved bytes since the program last reset them.",
    "allocated_peak": "Highest allocated bytes since the program last reset them.",
    "reclaimable": "Bytes that empty_cache() would give back now.",
    "largest_free_block": "Bytes of the largest free block, of half a minute ago at most.",
}
COUNTERS = {
    "alloc_retries": "Allocations that emptied the whole cache before they succeeded or failed.",
    "ooms": "Out-of-memory errors, also those that the program caught.",
}


class PrometheusCollector:
    """Give what PyTorch holds in this process to a registry: ``REGISTRY.register(PrometheusCollector())``.

    It reads only when it is scraped, and makes no GPU call. A process whose PyTorch has not used a GPU has
    the families without samples.
    """

    def __init__(self) -> None:
        core = importlib.import_module("prometheus_client.core")
        self._gauge = core.GaugeMetricFamily
        self._counter = core.CounterMetricFamily

    def describe(self) -> Iterator[object]:
        """Name the families without reading anything."""
        return iter(self._make_families().values())

    def collect(self) -> Iterator[object]:
        """Read the allocator, and yield every family."""
        families = self._make_families()
        worker.poller.update()
        for entry in worker.poller.read():
            devices = entry.get("devices")
            if entry.get("framework") != "torch" or not isinstance(devices, list):
                continue
            for device in devices:
                ordinal = str(device["ordinal"])
                for name in (*GAUGES, *COUNTERS):
                    if name in device:
                        families[name].add_metric([ordinal], device[name])
                for category, size in device.get("categories", {}).items():
                    families["category"].add_metric([ordinal, category], size)
        return iter(families.values())

    def _make_families(self) -> dict[str, Any]:
        made = {
            name: self._gauge(f"vramledger_torch_{name}_bytes", text, labels=["device"])
            for name, text in GAUGES.items()
        }
        for name, text in COUNTERS.items():
            made[name] = self._counter(f"vramledger_torch_{name}", text, labels=["device"])
        made["category"] = self._gauge(
            "vramledger_torch_category_bytes",
            "Bytes of parameters, gradients and optimizer state after a step; activations are the rest.",
            labels=["device", "category"],
        )
        return made
