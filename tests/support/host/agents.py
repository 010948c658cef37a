"""The agent inside a simulated program, as the exporter reads it from the socket."""

from __future__ import annotations

from collections.abc import Mapping

from vramledger.agent_protocol.messages import CATEGORIES
from vramledger.model.agent_report import (
    AgentReport,
    DeviceReport,
    FrameworkReport,
    GarbageReport,
    OutOfMemory,
)

MIB = 2**20
GIB = 2**30
_POLICIES = {"torch": "caching", "jax": "fraction"}
"""The defaults of these frameworks."""

Figures = Mapping[str, int]
Pools = Mapping[str, Figures]
"""The figures of each framework's pool on one device, by its agent's names."""


def report_of(pools: Mapping[str, Pools], age: float, clock: float) -> AgentReport:
    """Return an agent's report of the pools on each device.

    Args:
        pools: by UUID.
        age: seconds since the program's start.
        clock: Unix time of the report.
    """
    devices: dict[str, list[DeviceReport]] = {}
    for uuid, on_device in pools.items():
        for framework, figures in on_device.items():
            devices.setdefault(framework, []).append(_device(framework, uuid, figures))
    failed = any(figures.get("ooms", 0) for on_device in pools.values() for figures in on_device.values())
    return AgentReport(
        sequence=int(age),
        interval=1.0,
        dropped=0,
        agent="0.1",
        python="3.11.9",
        errors={"torch": 0},
        collector=GarbageReport(enabled=True, collections=int(age // 30)),
        frameworks=tuple(
            FrameworkReport(name, "1", policy=_POLICIES.get(name), devices=tuple(reported))
            for name, reported in devices.items()
        ),
        last_oom=OutOfMemory(clock - 60, "torch", 0, 2 * GIB, "hoarded", None) if failed else None,
    )


def _device(framework: str, uuid: str, figures: Figures) -> DeviceReport:
    """Return the report of one device; torch's live bytes are divided equally among the categories."""
    parts = CATEGORIES if framework == "torch" else ()
    share = figures.get("allocated", 0) // len(CATEGORIES)
    return DeviceReport(None, uuid, figures, dict.fromkeys(parts, share))
