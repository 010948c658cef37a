"""The stand-in's state file as Python sees it: state.h mirrored field by field.

``nvmlInit`` of the stand-in compares magic, version and size, so a difference shows at once.
"""

import re
from ctypes import Structure, c_char, c_double, c_uint32, c_uint64, sizeof
from pathlib import Path
from typing import Any, ClassVar

SOURCES = Path(__file__).parent
_HEADER = (SOURCES / "state.h").read_text()


def _constant(name: str) -> int:
    found = re.search(rf"#define {name} (0x)?([0-9a-f]+)", _HEADER)
    if found is None:
        raise LookupError(f"state.h defines no {name}")
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


def _u32(names: str) -> list[tuple[str, Any]]:
    return [(name, c_uint32) for name in names.split()]


def _u64(names: str) -> list[tuple[str, Any]]:
    return [(name, c_uint64) for name in names.split()]


class ProcessLayout(_Layout):
    _fields_: ClassVar = [*_u64("bytes"), *_u32("pid unused")]


class ListLayout(_Layout):
    _fields_: ClassVar = [
        *_u32("count count_after_size_question"),
        ("entries", ProcessLayout * MAX_PROCESSES),
    ]


class SampleLayout(_Layout):
    _fields_: ClassVar = [*_u64("timestamp"), *_u32("pid sm memory encoder decoder unused")]


class UnitLayout(_Layout):
    _fields_: ClassVar = [
        ("uuid", c_char * 96),
        ("name", c_char * 96),
        *_u64("total reserved used unattributed"),
        *_u32("present gpu_instance compute_instance gpu_slices compute_slices unused"),
        *_u32("numa_node placement_start placement_size padding"),
        ("lists", ListLayout * len(LISTS)),
        ("gpm_level", c_double * MAX_GPM_METRICS),
        ("gpm_total", c_double * MAX_GPM_METRICS),
    ]


class LimitsLayout(_Layout):
    _fields_: ClassVar = [("cgroup", c_char * 256), *_u64("soft hard used")]


class DeviceLayout(_Layout):
    _fields_: ClassVar = [
        *(("whole", UnitLayout), ("instances", UnitLayout * MAX_INSTANCES), ("bus_id", c_char * 32)),
        *(("serial", c_char * 32), *_u64("throttle_reasons energy"), ("ecc", c_uint64 * 2)),
        *(*_u64("bar1_total bar1_used event_types"), *_u32("minor lost mig_mode")),
        *_u32("gpu_utilization memory_utilization encoder_utilization decoder_utilization"),
        *_u32("temperature memory_temperature recovery_action power power_limit"),
        ("clocks", c_uint32 * 4),
        ("max_clocks", c_uint32 * 4),
        *_u32("performance_state fan_speed"),
        ("remapped_rows", c_uint32 * 4),
        *_u32("pcie_transmit pcie_receive"),
        *_u32("pcie_generation pcie_max_generation pcie_width pcie_max_width"),
        *_u32("capability_major capability_minor persistence gpm_supported gpm_last_metric addressing_mode"),
        *_u32("virtualization_mode limit_count spare gpu_utilization_peak sample_count"),
        ("samples", SampleLayout * MAX_PROCESSES),
        ("limits", LimitsLayout * MAX_LIMITS),
    ]


class EventLayout(_Layout):
    _fields_: ClassVar = [*_u64("type data"), *_u32("device gpu_instance compute_instance unused")]


class ControlLayout(_Layout):
    _fields_: ClassVar = [
        *((name, c_uint64 * (MAX_DEVICES + 1)) for name in ("calls", "failed", "spoiled")),
        *((name, c_uint32 * (MAX_DEVICES + 1)) for name in ("error", "hang")),
        *_u32("latency_us unused"),
    ]


class ChaosLayout(_Layout):
    _fields_: ClassVar = [*_u64("random codes injected"), *_u32("fail spoil grow slow slow_us unused")]


class StateLayout(_Layout):
    _fields_: ClassVar = [
        *_u64("magic"),
        *_u32("version size driver_error driver_epoch device_count cuda_version"),
        ("driver_version", c_char * 96),
        *_u32("confidential developer_tools"),
        *_u64("event_count"),
        ("chaos", ChaosLayout),
        ("events", EventLayout * MAX_EVENTS),
        ("controls", ControlLayout * len(FUNCTIONS)),
        ("devices", DeviceLayout * MAX_DEVICES),
    ]


STATE_SIZE = sizeof(StateLayout)
