"""The agent inside a simulated program, as the exporter reads it from the socket."""

from collections.abc import Mapping
from typing import NamedTuple

from vramledger.model.agent_report import (
    AgentReport,
    DeviceReport,
    FrameworkReport,
    GarbageReport,
    OutOfMemory,
)
from vramledger_agent.oom.verdict import AllocationFailure, classify
from vramledger_agent.protocol.messages import CATEGORIES

MIB = 2**20
GIB = 2**30
_POLICIES = {"torch": "caching", "jax": "fraction"}
"""The defaults of these frameworks."""

Figures = Mapping[str, int]
Pools = Mapping[str, Figures]
"""The figures of each framework's pool on one device, by its agent's names."""


REQUESTED = 2 * GIB
"""Bytes that each failed allocation asked for."""


class Around(NamedTuple):
    """What an agent is told of a device when an allocation fails on it: bytes."""

    total: int
    free: int
    others: int


class Failures:
    """The newest failed allocation of each program, with the verdict that its agent would have had."""

    def __init__(self) -> None:
        self._newest: dict[int, tuple[int, OutOfMemory | None]] = {}

    def newest(
        self, pid: int, pools: Mapping[str, Pools], around: Mapping[str, Around], clock: float
    ) -> OutOfMemory | None:
        """Return a program's newest failure, new where torch has counted more; pools and devices by UUID."""
        counts = {uuid: each["torch"].get("ooms", 0) for uuid, each in pools.items() if "torch" in each}
        known, newest = self._newest.get(pid, (0, None))
        if sum(counts.values()) > known:
            uuid = max(counts, key=lambda each: counts[each])
            newest = OutOfMemory(
                clock, "torch", 0, REQUESTED, _verdict(pools[uuid]["torch"], around[uuid]), None
            )
        self._newest[pid] = (sum(counts.values()), newest)
        return newest


def _verdict(torch: Figures, around: Around) -> str:
    reserved, active, free = (torch.get(name) for name in ("reserved", "active", "largest_free_block"))
    capacity = around.total
    failure = AllocationFailure(
        REQUESTED, capacity, around.free, reserved, active, free, others=around.others, device_total=capacity
    )
    return classify(failure)


def report_of(pools: Mapping[str, Pools], age: float, last_oom: OutOfMemory | None = None) -> AgentReport:
    """Return the report of the pools by UUID, ``age`` seconds after the start, with the newest failure."""
    devices: dict[str, list[DeviceReport]] = {}
    for uuid, on_device in pools.items():
        for framework, figures in on_device.items():
            devices.setdefault(framework, []).append(_device(framework, uuid, figures))
    frameworks = []
    for name, reported in devices.items():
        torch = name == "torch"
        settings = {"expandable_segments": "false"} if torch else {}
        told = FrameworkReport(
            name, "1", policy=_POLICIES.get(name), devices=tuple(reported),
            allocator="native" if torch else None, settings=settings,
        )  # fmt: skip
        frameworks.append(told)
    return AgentReport(
        sequence=int(age), interval=1.0, dropped=0, agent="0.1", python="3.11.9", errors={"torch": 0},
        collector=GarbageReport(enabled=True, collections=int(age // 30)), frameworks=tuple(frameworks),
        last_oom=last_oom,
    )  # fmt: skip


def _device(framework: str, uuid: str, figures: Figures) -> DeviceReport:
    """Return the report of one device; torch's live bytes are divided equally among the categories."""
    parts = CATEGORIES if framework == "torch" else ()
    share = figures.get("allocated", 0) // len(CATEGORIES)
    return DeviceReport(None, uuid, dict.fromkeys(parts, share), **figures)
