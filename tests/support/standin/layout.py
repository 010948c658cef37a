"""The stand-in's state file as Python sees it: state.h mirrored field by field.

``nvmlInit`` of the stand-in compares magic, version and size, so a difference shows at once.
"""

from __future__ import annotations

import re
from ctypes import Structure, c_char, c_double, c_uint32, c_uint64, sizeof
from pathlib import Path
from typing import Any, ClassVar

SOURCES = Path(__file__).parent
_HEADER = (SOURCES / "state.h").read_text()


def _constant(name: str) -> int:
    found = re.search(rf"#define {name} (0x)?([0-9a-f]+)", _HEADER)
    if found is None:
        message = f"state.h defines no {name}"
        raise LookupError(message)
    return int(found[2], 16 if found[1] else 10)


STATE_MAGIC = _constant("STATE_MAGIC")
STATE_VERSION = _constant("STATE_VERSION")
MAX_DEVICES = _constant("MAX_DEVICES")
MAX_INSTANCES = _constant("MAX_INSTANCES")
MAX_PROCESSES = _constant("MAX_PROCESSES")
MAX_EVENTS = _constant("MAX_EVENTS")
MAX_LIMITS = _constant("MAX_LIMITS")
MAX_GPM_METRICS = _constant("MAX_GPM_METRICS")
ANY_DEVICE = MAX_DEVICES
NOT_AVAILABLE = 2**64 - 1
"""NVML's value for "not available" among 64-bit values."""
NOT_SUPPORTED_32 = 2**32 - 1
"""For the 32-bit values that a device may not have: its query answers NOT_SUPPORTED."""
DERIVED = 2**64 - 2
"""For ``used``: the sum of the processes and the unattributed bytes, at the moment of the call."""

FUNCTIONS = {name: number for number, name in enumerate(re.findall(r"X\((nvml\w+)\)", _HEADER))}
"""Number of each function of the library, by name."""

LISTS = ("compute", "graphics", "mps")


class _Layout(Structure):
    """A structure whose fields have types for the reader, not for the type checker."""

    _fields_: ClassVar[list[tuple[str, Any]]]

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # only reached for unknown names
        raise AttributeError(name)


class ProcessLayout(_Layout):
    """Mirror ``struct process``."""

    _fields_: ClassVar = [("bytes", c_uint64), ("pid", c_uint32), ("unused", c_uint32)]


class ListLayout(_Layout):
    """Mirror ``struct process_list``."""

    _fields_: ClassVar = [
        ("count", c_uint32),
        ("count_after_size_question", c_uint32),
        ("entries", ProcessLayout * MAX_PROCESSES),
    ]


class SampleLayout(_Layout):
    """Mirror ``struct utilization_sample``."""

    _fields_: ClassVar = [
        ("timestamp", c_uint64),
        *((name, c_uint32) for name in ("pid", "sm", "memory", "encoder", "decoder", "unused")),
    ]


class UnitLayout(_Layout):
    """Mirror ``struct unit``."""

    _fields_: ClassVar = [
        ("uuid", c_char * 96),
        ("name", c_char * 96),
        *((name, c_uint64) for name in ("total", "reserved", "used", "unattributed")),
        *((name, c_uint32) for name in ("present", "gpu_instance", "compute_instance")),
        *((name, c_uint32) for name in ("gpu_slices", "compute_slices", "unused")),
        *((name, c_uint32) for name in ("numa_node", "placement_start", "placement_size", "padding")),
        ("lists", ListLayout * len(LISTS)),
        ("gpm_level", c_double * MAX_GPM_METRICS),
        ("gpm_total", c_double * MAX_GPM_METRICS),
    ]


class LimitsLayout(_Layout):
    """Mirror ``struct limits``."""

    _fields_: ClassVar = [("cgroup", c_char * 256), *((name, c_uint64) for name in ("soft", "hard", "used"))]


class DeviceLayout(_Layout):
    """Mirror ``struct device``."""

    _fields_: ClassVar = [
        ("whole", UnitLayout),
        ("instances", UnitLayout * MAX_INSTANCES),
        ("bus_id", c_char * 32),
        ("serial", c_char * 32),
        ("throttle_reasons", c_uint64),
        ("energy", c_uint64),
        ("ecc", c_uint64 * 2),
        *((name, c_uint64) for name in ("bar1_total", "bar1_used", "event_types")),
        *((name, c_uint32) for name in ("minor", "lost", "mig_mode")),
        *((f"{name}_utilization", c_uint32) for name in ("gpu", "memory", "encoder", "decoder")),
        *(
            (name, c_uint32)
            for name in ("temperature", "memory_temperature", "recovery_action", "power", "power_limit")
        ),
        ("clocks", c_uint32 * 4),
        ("max_clocks", c_uint32 * 4),
        ("performance_state", c_uint32),
        ("fan_speed", c_uint32),
        ("remapped_rows", c_uint32 * 4),
        ("pcie_transmit", c_uint32),
        ("pcie_receive", c_uint32),
        *((f"pcie_{name}", c_uint32) for name in ("generation", "max_generation", "width", "max_width")),
        *((name, c_uint32) for name in ("capability_major", "capability_minor", "persistence")),
        *((name, c_uint32) for name in ("gpm_supported", "gpm_last_metric", "addressing_mode")),
        *((name, c_uint32) for name in ("virtualization_mode", "limit_count", "spare")),
        ("gpu_utilization_peak", c_uint32),
        ("sample_count", c_uint32),
        ("samples", SampleLayout * MAX_PROCESSES),
        ("limits", LimitsLayout * MAX_LIMITS),
    ]


class EventLayout(_Layout):
    """Mirror ``struct event``."""

    _fields_: ClassVar = [
        ("type", c_uint64),
        ("data", c_uint64),
        *((name, c_uint32) for name in ("device", "gpu_instance", "compute_instance", "unused")),
    ]


class ControlLayout(_Layout):
    """Mirror ``struct control``."""

    _fields_: ClassVar = [
        *((name, c_uint64 * (MAX_DEVICES + 1)) for name in ("calls", "failed", "spoiled")),
        ("error", c_uint32 * (MAX_DEVICES + 1)),
        ("hang", c_uint32 * (MAX_DEVICES + 1)),
        ("latency_us", c_uint32),
        ("unused", c_uint32),
    ]


class ChaosLayout(_Layout):
    """Mirror ``struct chaos``."""

    _fields_: ClassVar = [
        *((name, c_uint64) for name in ("random", "codes", "injected")),
        *((name, c_uint32) for name in ("fail", "spoil", "grow", "slow", "slow_us", "unused")),
    ]


class StateLayout(_Layout):
    """Mirror ``struct state``."""

    _fields_: ClassVar = [
        ("magic", c_uint64),
        ("version", c_uint32),
        ("size", c_uint32),
        ("driver_error", c_uint32),
        ("driver_epoch", c_uint32),
        ("device_count", c_uint32),
        ("cuda_version", c_uint32),
        ("driver_version", c_char * 96),
        ("confidential", c_uint32),
        ("developer_tools", c_uint32),
        ("event_count", c_uint64),
        ("chaos", ChaosLayout),
        ("events", EventLayout * MAX_EVENTS),
        ("controls", ControlLayout * len(FUNCTIONS)),
        ("devices", DeviceLayout * MAX_DEVICES),
    ]


STATE_SIZE = sizeof(StateLayout)
