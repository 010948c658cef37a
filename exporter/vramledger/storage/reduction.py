"""Reduce a reading to what a verdict or the ledger needs, so that a second of it takes some bytes only.

Left out are the sensors that no verdict uses (temperatures, clocks, energy, ECC) and how long reading took.
STORAGE.md names all that is left out. Ratios and rates keep two digits, times a hundredth of a second, those
of utilisation rows a tenth. What is not 0 stays above 0, and bytes stay exact. What follows from the rest is
left out, and what changes only because time has passed is written as a distance in time.
:func:`expand_reading` makes both again. This saves a quarter of an hour's bytes.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import fields

from vramledger.model.agent_report import Agent
from vramledger.model.holder_facts import HOLDER_FACTS
from vramledger.model.reading import DeviceReading, ProcessFacts, Reading, agent_plain

SET, GONE, ITEMS = "=", "-", "#"
"""Of a patch, which is how a JSON value differs from the one before. That of an object is an object: a scalar
is the new value of a key, an object the patch of it. SET replaces a value as a whole, GONE names keys that
are gone, ITEMS has the patches of an array's items by their position."""

_RESERVED = frozenset({SET, GONE, ITEMS})
"""Keys that a patch cannot name: an object with one of them is written as a whole."""

_LISTS = (list, tuple)
_CONTAINERS = (dict, list, tuple)


def difference(before: Any, after: Any) -> Any:  # noqa: ANN401 whatever JSON has
    """Return the patch that makes ``after`` of ``before``; they differ."""
    if isinstance(after, dict):
        if isinstance(before, dict) and _RESERVED.isdisjoint(after):
            return _object_difference(before, after)
    elif isinstance(after, _LISTS):
        nested = any(isinstance(each, _CONTAINERS) for each in after)  # else it is as short to write it again
        if nested and isinstance(before, _LISTS) and len(before) == len(after):
            changed = {
                str(place): difference(old, new)
                for place, (old, new) in enumerate(zip(before, after, strict=True))
                if old != new
            }
            return {ITEMS: changed}
    else:
        return after
    return {SET: after}


def _object_difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for key, new in after.items():
        old = before.get(key, _MISSING)
        if old is _MISSING:
            patch[key] = {SET: new} if isinstance(new, _CONTAINERS) else new
        elif old != new or type(old) is not type(new):
            patch[key] = difference(old, new)
    if len(before) + len(patch) != len(after) or not before.keys() <= after.keys():
        gone = [key for key in before if key not in after]
        if gone:
            patch[GONE] = gone
    return patch


_MISSING = object()


def apply(before: Any, patch: Any) -> Any:  # noqa: ANN401
    """Return what a patch makes of ``before``, which stays. Raises ValueError if it does not fit."""
    if not isinstance(patch, dict):
        return patch
    if SET in patch:
        return patch[SET]
    if ITEMS in patch:
        if not isinstance(before, list):
            raise ValueError("a patch of an array where there is none")
        items = list(before)
        for place, each in patch[ITEMS].items():
            items[int(place)] = apply(items[int(place)], each)
        return items
    if not isinstance(before, dict):
        raise ValueError("a patch of an object where there is none")  # noqa: TRY004
    after = dict(before)
    for key in patch.get(GONE, ()):
        del after[key]
    for key, each in patch.items():
        if key != GONE:
            after[key] = apply(after.get(key), each)
    return after


_HARDWARE = (
    "device_power_watts",
    "device_power_limit_watts",
    "device_recovery_action",
    "device_encoder_utilization_ratio",
    "device_decoder_utilization_ratio",
)
"""The sensors from which a verdict is made."""

_CPU_UNIT = 1e-4
"""Seconds: a piece of work on a GPU takes four of them."""

_SETTING = re.compile(r"[-+.\w:=,]{0,64}", re.ASCII)
"""A value of an allow-listed variable that is a number or a word. No other value is stored."""

_DEVICE_FIELDS = (
    *("index", "uuid", "name", "pci_bus_id", "minor", "parent", "mig_profile", "gpu_instance"),
    *("compute_instance", "mig_placement", "divided", "error", "memory", "memory_kind", "node"),
    *("addressing_mode", "virtualization", "confidential", "limits", "partition", "processes", "failed"),
    *("words", "reset_required", "mps_listed"),
)

_READING_FIELDS = (
    *("boot_id", "boot_time", "ticks", "host_pid_namespace", "failure", "released_until", "driver_version"),
    *("cuda_version", "rows", "unseen", "ended", "device_files", "managed", "hidden"),
    *("threads", "hidden_unreadable", "schedulers", "pods", "agent_socket"),
    *(fact.field for fact in HOLDER_FACTS),
)
"""These are stored as they are."""


def two_digits(value: float) -> float:
    """Round to two significant digits; only 0 becomes 0."""
    return float(f"{value:.1e}") if value else 0.0


def reduce_reading(reading: Reading) -> dict[str, Any]:
    """Return a reading as JSON values, reduced."""
    plain = _set_fields(reading, _READING_FIELDS)
    plain["monotonic_before"] = round(reading.time - reading.monotonic, 2)
    for name in ("unseen", "ended"):  # JSON has texts as keys
        if name in plain:
            plain[name] = {str(pid): why for pid, why in plain[name].items()}
    if reading.unchanged is not None:  # the span is nearly the same each time
        plain["unchanged_before"] = round(reading.monotonic - reading.unchanged, 1)
    if reading.schedulers_read is not None:
        plain["schedulers_read"] = round(reading.schedulers_read, 1)
    if reading.devices:
        plain["devices"] = [_device(each, reading.time) for each in reading.devices]
    if reading.cpu_taken:
        taken = [round(seconds / _CPU_UNIT) for _, seconds in reading.cpu_taken]
        plain["cpu_taken"] = {"pids": [pid for pid, _ in reading.cpu_taken], "units": taken}
    if reading.facts:
        plain["facts"] = [facts_plain(each) for each in reading.facts]
    if reading.waits:
        plain["waits"] = [each._replace(seconds=round(each.seconds, 1)) for each in reading.waits]
    if reading.events:
        plain["events"] = [each._replace(time=round(each.time, 2)) for each in reading.events]
    plain["collectors"] = {name: (ok, 0.0) for name, (ok, _) in reading.collectors.items()}
    return {**plain, **_agents(reading.agents)}


def _set_fields(value: Reading | DeviceReading | ProcessFacts, names: Iterable[str]) -> dict[str, Any]:
    """Return these fields, without those empty by default; root's uid of 0 is not that."""
    defaults = _DEFAULTS[type(value)]
    return {name: item for name in names if (item := getattr(value, name)) or item != defaults[name]}


_DEFAULTS = {
    kind: {
        each.name: each.default if each.default_factory is NODEFAULT else each.default_factory()
        for each in fields(kind)
    }
    for kind in (Reading, DeviceReading, ProcessFacts)
}


def _agents(agents: Iterable[Agent]) -> dict[str, Any]:
    reports = [agent_plain(each) for each in agents]
    counts = {
        place: figures.pop("allocations") for place, figures in _counting(reports) if "allocations" in figures
    }
    return {"agents": reports, "allocations": counts} if reports else {}


def expand_reading(value: Mapping[str, Any], time: float) -> dict[str, Any]:
    """Return a stored reading as ``decode`` does. Raises LookupError or TypeError if it is not one."""
    plain: dict[str, Any] = copy.deepcopy(dict(value))
    plain["time"] = time
    plain["monotonic"] = round(time - plain.pop("monotonic_before"), 2)
    if "unchanged_before" in plain:
        plain["unchanged"] = round(plain["monotonic"] - plain.pop("unchanged_before"), 2)
    for device in plain.get("devices", ()):
        if isinstance(memory := device.get("memory"), dict):
            total, used, reserved = memory["total"], memory["used"], memory["reserved"]
            free = total - used - (reserved or 0) + memory["more_free"]
            device["memory"] = [total, free, used, reserved]
        for row in device.get("process_utilization") or ():
            row[1] = round(round(time, 1) - row[1], 1)
    if "cpu_taken" in plain:
        taken = [round(units * _CPU_UNIT, 4) for units in plain["cpu_taken"]["units"]]
        plain["cpu_taken"] = list(zip(plain["cpu_taken"]["pids"], taken, strict=True))
    counts = plain.pop("allocations", {})
    for place, figures in _counting(plain.get("agents", ())):
        if place in counts:
            figures["allocations"] = counts[place]
    return plain


def _counting(agents: Iterable[list[Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, agent in enumerate(agents):
        for name, framework in enumerate((agent[-1] or {}).get("frameworks", ())):
            for ordinal, device in enumerate(framework.get("devices", ())):
                yield f"{number}.{name}.{ordinal}", device


def _device(device: DeviceReading, time: float) -> dict[str, Any]:
    plain = _set_fields(device, _DEVICE_FIELDS)
    if device.memory is not None:
        total, free, used, reserved = device.memory
        more = free - (total - used - (reserved or 0))
        plain["memory"] = {"total": total, "used": used, "reserved": reserved, "more_free": more}
    if device.utilization is not None:
        plain["utilization"] = {name: two_digits(value) for name, value in device.utilization.items()}
    if device.process_utilization is not None:
        plain["process_utilization"] = [
            (each.pid, round(round(time, 1) - round(each.time, 1), 1), *map(two_digits, each[2:]))
            for each in device.process_utilization
        ]
    if device.activity is not None:
        plain["activity"] = {
            name: two_digits(value) for name, value in device.activity.items() if name != "occupancy"
        }
    hardware = {
        name: two_digits(value) if isinstance(value, (int, float)) else dict(value)
        for name, value in ((name, device.hardware.get(name)) for name in _HARDWARE)
        if value is not None
    }
    if hardware:
        plain["hardware"] = hardware
    return plain


def facts_plain(facts: ProcessFacts) -> dict[str, Any]:
    """Return the facts of a process as JSON values, without values of its environment that may say more."""
    plain = _set_fields(facts, ProcessFacts.__struct_fields__)
    if facts.settings:
        plain["settings"] = safe_settings(facts.settings)
    return plain


def safe_settings(settings: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the variables with their values, where these are numbers or words."""
    return tuple((name, value if _SETTING.fullmatch(value) else "…") for name, value in settings)
