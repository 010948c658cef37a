"""Reduce a reading to what a verdict or the ledger needs, so that a second of it takes some bytes only.

Left out are the sensors that no verdict uses (temperatures, clocks, energy, ECC) and how long reading took.
Ratios and rates keep two digits, times a hundredth of a second, those of utilisation rows a tenth. What is
not 0 stays above 0, and bytes stay exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from vramledger.model.reading import DeviceReading, ProcessFacts, Reading, agent_plain

_HARDWARE = (
    "device_power_watts",
    "device_power_limit_watts",
    "device_encoder_utilization_ratio",
    "device_decoder_utilization_ratio",
)
"""The sensors from which a verdict is made."""

_SETTING = re.compile(r"[-+.\w:=,]{0,64}", re.ASCII)
"""A value of an allow-listed variable that is a number or a word. No other value is stored."""

_DEVICE_FIELDS = (
    *("index", "uuid", "name", "pci_bus_id", "minor", "parent", "mig_profile", "gpu_instance"),
    *("compute_instance", "mig_placement", "divided", "error", "memory", "memory_kind", "node"),
    *("addressing_mode", "virtualization", "processes", "failed"),
)

_READING_FIELDS = (
    *("boot_id", "boot_time", "ticks", "host_pid_namespace", "failure", "released_until", "driver_version"),
    *("cuda_version", "rows", "unseen", "ended", "device_files", "launches", "managed", "hidden"),
    *("hidden_unreadable", "schedulers", "agent_socket"),
)
"""These are stored as they are."""


def two_digits(value: float) -> float:
    """Round to two significant digits; only 0 becomes 0."""
    return float(f"{value:.1e}") if value else 0.0


def reduce_reading(reading: Reading) -> dict[str, Any]:
    """Return a reading as JSON values, reduced."""
    plain: dict[str, Any] = {
        name: value for name in _READING_FIELDS if (value := getattr(reading, name)) not in (None, (), {})
    }
    if reading.hidden is not None:
        plain["hidden"] = reading.hidden
    plain["time"], plain["monotonic"] = round(reading.time, 2), round(reading.monotonic, 2)
    for name in ("unseen", "ended"):  # JSON has texts as keys
        if name in plain:
            plain[name] = {str(pid): why for pid, why in plain[name].items()}
    if reading.schedulers_read is not None:
        plain["schedulers_read"] = round(reading.schedulers_read, 1)
    if reading.devices:
        plain["devices"] = [_device(each) for each in reading.devices]
    if reading.facts:
        plain["facts"] = [facts_plain(each) for each in reading.facts]
    if reading.waits:
        plain["waits"] = [each._replace(seconds=round(each.seconds, 1)) for each in reading.waits]
    if reading.events:
        plain["events"] = [each._replace(time=round(each.time, 2)) for each in reading.events]
    plain["collectors"] = {name: (ok, 0.0) for name, (ok, _) in reading.collectors.items()}
    if reading.agents:
        plain["agents"] = [agent_plain(each) for each in reading.agents]
    return plain


def _device(device: DeviceReading) -> dict[str, Any]:
    plain = {name: value for name in _DEVICE_FIELDS if (value := getattr(device, name)) not in (None, ())}
    if device.processes is not None:
        plain["processes"] = device.processes
    if device.utilization is not None:
        plain["utilization"] = {name: two_digits(value) for name, value in device.utilization.items()}
    if device.process_utilization is not None:
        plain["process_utilization"] = [
            (each.pid, round(each.time, 1), *map(two_digits, each[2:])) for each in device.process_utilization
        ]
    if device.activity is not None:
        plain["activity"] = {
            name: two_digits(value) for name, value in device.activity.items() if name != "occupancy"
        }
    hardware = {name: _rounded(device.hardware[name]) for name in _HARDWARE if name in device.hardware}
    if hardware:
        plain["hardware"] = hardware
    return plain


def _rounded(value: float | Mapping[str, float]) -> object:
    return two_digits(value) if isinstance(value, (int, float)) else dict(value)


def facts_plain(facts: ProcessFacts) -> dict[str, Any]:
    """Return the facts of a process as JSON values, without values of its environment that may say more."""
    plain = {
        name: value
        for name in ProcessFacts.__slots__
        if (value := getattr(facts, name)) is not None
        and (value not in ("", False, ()) or name in _KEEP_EMPTY)
    }
    if facts.settings:
        plain["settings"] = safe_settings(facts.settings)
    return plain


_KEEP_EMPTY = frozenset({"cgroup", "libraries", "uses_gpu", "leader_alive"})
"""An empty value of these differs from one that is not known."""


def safe_settings(settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the variables with their values, where these are numbers or words."""
    return tuple((name, value if _SETTING.fullmatch(value) else "…") for name, value in settings)
