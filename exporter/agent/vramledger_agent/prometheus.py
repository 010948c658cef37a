"""Give the agent's figures to a program that has a Prometheus registry of its own.

The program brings prometheus_client. The agent does not depend on it, and imports it by name when the program
makes a collector. The metric families have the same names and values as those of the exporter. They name a
device by the framework's own number instead of a UUID, which a process does not know without a call to CUDA.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from vramledger_agent import import_hook
from vramledger_agent.protocol.frameworks import (
    COUNTER_FIGURES,
    POOL_FIGURES,
    REPORTING_FRAMEWORKS,
    TORCH_FIGURES,
)
from vramledger_agent.worker import worker


class PrometheusCollector:
    """Add this process' framework figures to a registry: ``REGISTRY.register(PrometheusCollector())``.

    It reads when it is scraped, and makes no GPU call. If no framework has used a GPU, the families have no
    samples.
    """

    def __init__(self) -> None:
        import_hook.install()
        core = importlib.import_module("prometheus_client.core")
        self._gauge = core.GaugeMetricFamily
        self._counter = core.CounterMetricFamily

    def describe(self) -> Iterator[object]:
        """Name the families without reading anything."""
        return iter(self._make_families().values())

    def collect(self) -> Iterator[object]:
        families = self._make_families()
        worker.adopt_process()
        worker.poller.start_initialised()
        worker.poller.refresh()
        for entry in worker.poller.read():
            framework = REPORTING_FRAMEWORKS[str(entry["framework"])]
            devices = entry.get("devices")
            for device in devices if isinstance(devices, list) else ():
                ordinal = str(device["ordinal"])
                figures = {name: device[name] for name in framework.figures if device.get(name) is not None}
                for name, value in framework.general_figures(figures).items():
                    families["framework", name].add_metric([ordinal, framework.name], value)
                for name, value in figures.items():
                    if (framework.name, name) in families:
                        families[framework.name, name].add_metric([ordinal], value)
                for category, size in device.get("categories", {}).items():
                    families["torch", "category"].add_metric([ordinal, category], size)
        return iter(families.values())

    def _make_families(self) -> dict[tuple[str, str], Any]:
        made = {}
        for name, text in POOL_FIGURES.items():
            family = f"vramledger_framework_{name}_bytes"
            made["framework", name] = self._gauge(family, f"{text}.", labels=["device", "framework"])
        for name, text in TORCH_FIGURES.items():
            made["torch", name] = self._gauge(f"vramledger_torch_{name}_bytes", f"{text}.", labels=["device"])
        for name, text in COUNTER_FIGURES.items():
            made["torch", name] = self._counter(f"vramledger_torch_{name}", f"{text}.", labels=["device"])
        made["torch", "category"] = self._gauge(
            "vramledger_torch_category_bytes",
            "Bytes of parameters, gradients and optimizer state after a step; activations are the rest.",
            labels=["device", "category"],
        )
        return made
