"""Write readings as JSON and read them: for the pipe of the sampler, for recordings, and for the storage."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import lru_cache
from typing import Any

from vramledger.errors import RecordingError
from vramledger.model.agent_report import Agent, AgentSocket, RefusedError, plain, read_report
from vramledger.model.reading import (
    CgroupLimit,
    DeviceReading,
    DriverWait,
    Grant,
    HiddenHolder,
    KvCache,
    LaunchCount,
    ManagedMappings,
    MemoryReading,
    NodeMemory,
    Owner,
    ParentFacts,
    PodLabels,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    ProcessUtilization,
    Rank,
    Reading,
    Scheduler,
    XidEvent,
)


def encode(reading: Reading) -> bytes:
    """Write a reading as one line of JSON, without the fields that have their default."""
    return json.dumps(_plain(reading), separators=(",", ":"), default=_plain).encode() + b"\n"


def decode(line: bytes | str) -> Reading:
    """Read one line that :func:`encode` wrote.

    Raises:
        RecordingError: the line is not a reading.
    """
    try:
        raw = json.loads(line)
        raw["devices"] = tuple(_device(device) for device in raw.get("devices", ()))
        raw["rows"] = tuple(ProcessRow(*row) for row in raw.get("rows", ()))
        raw["unseen"] = {int(pid): why for pid, why in raw.get("unseen", {}).items()}
        raw["ended"] = {int(pid): why for pid, why in raw.get("ended", {}).items()}
        raw["facts"] = tuple(_facts(facts) for facts in raw.get("facts", ()))
        raw["waits"] = tuple(DriverWait(*wait) for wait in raw.get("waits", ()))
        raw["launches"] = tuple(LaunchCount(*count) for count in raw.get("launches", ()))
        raw["kv_caches"] = tuple(KvCache(*each) for each in raw.get("kv_caches", ()))
        raw["cpu_taken"] = tuple((int(pid), float(seconds)) for pid, seconds in raw.get("cpu_taken", ()))
        raw["managed"] = tuple(ManagedMappings(*each) for each in raw.get("managed", ()))
        raw["events"] = tuple(XidEvent(*event) for event in raw.get("events", ()))
        raw["collectors"] = {
            name: (bool(ok), float(seconds)) for name, (ok, seconds) in raw.get("collectors", {}).items()
        }
        if raw.get("hidden") is not None:
            raw["hidden"] = tuple(
                HiddenHolder(pid, start, kind, command, user, tuple(minors))
                for pid, start, kind, command, user, minors in raw["hidden"]
            )
        raw["schedulers"] = tuple(_scheduler(*each) for each in raw.get("schedulers", ()))
        raw["pods"] = tuple(_pod_labels(*each) for each in raw.get("pods", ()))
        if raw.get("failure") is not None:
            reason, message = raw["failure"]
            raw["failure"] = (str(reason), str(message))
        raw["agents"] = tuple(agent_from(each) for each in raw.get("agents", ()))
        if raw.get("agent_socket") is not None:
            raw["agent_socket"] = AgentSocket(*raw["agent_socket"])
        return Reading(**raw)
    except (RefusedError, ValueError, TypeError, KeyError, AttributeError) as error:
        message = f"not a reading ({error}); record it again with 'vramledger capture'"
        raise RecordingError(message) from error


def agent_from(raw: list[Any]) -> Agent:
    """Read an agent that :func:`agent_plain` wrote.

    Raises:
        RefusedError: its report is not valid.
    """
    *attested, report = raw
    return Agent._make([*attested, None if report is None else read_report(report)])


def agent_plain(agent: Agent) -> list[Any]:
    """Write an agent as JSON values."""
    return [*agent[:-1], None if agent.report is None else plain(agent.report)]


def _device(raw: dict[str, Any]) -> DeviceReading:
    if raw.get("memory") is not None:
        raw["memory"] = MemoryReading(*raw["memory"])
    if raw.get("limits") is not None:
        raw["limits"] = tuple(CgroupLimit(*each) for each in raw["limits"])
    if raw.get("node") is not None:
        raw["node"] = NodeMemory(*raw["node"])
    if raw.get("processes") is not None:
        raw["processes"] = tuple(ProcessEntry(*entry) for entry in raw["processes"])
    if raw.get("process_utilization") is not None:
        raw["process_utilization"] = tuple(
            ProcessUtilization(*sample) for sample in raw["process_utilization"]
        )
    raw["failed"] = tuple(raw.get("failed", ()))
    return DeviceReading(**raw)


def _facts(raw: dict[str, Any]) -> ProcessFacts:
    if raw.get("parent") is not None:
        parent = ParentFacts(*raw["parent"])
        raw["parent"] = parent._replace(signs=None if parent.signs is None else tuple(parent.signs))
    for name in ("nspid", "ignores", "signs", "denied"):
        raw[name] = tuple(raw.get(name, ()))
    for name in ("cgroup", "libraries"):
        if raw.get(name) is not None:
            raw[name] = _one_for_all(tuple(raw[name]))
    if raw.get("owner") is not None:
        raw["owner"] = Owner(*raw["owner"])
    if raw.get("rank") is not None:
        raw["rank"] = Rank(*raw["rank"])
    raw["settings"] = tuple((str(name), str(value)) for name, value in raw.get("settings", ()))
    return ProcessFacts(**raw)


@lru_cache(maxsize=256)
def _one_for_all(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the first of equal tuples: a container's processes have equal ones, 0.8 KiB each."""
    return lines


def _scheduler(name: str, managed: list[str], grants: list[Any], complete: bool) -> Scheduler:  # noqa: FBT001 as it stands in a recording
    given = (Grant(kind, owner, tuple(devices), *rest) for kind, owner, devices, *rest in grants)
    return Scheduler(str(name), tuple(managed), tuple(given), bool(complete))


def _pod_labels(namespace: str, pod: str, labels: list[list[str | None]]) -> PodLabels:
    given = tuple((str(name), None if value is None else str(value)) for name, value in labels)
    return PodLabels(str(namespace), str(pod), given)


def _plain(value: Reading | DeviceReading | ProcessFacts) -> dict[str, Any]:
    """Turn a dataclass into what json writes; tuples (rows, entries) already are.

    json then asks for the values inside it, one at a time, so the facts of 512 processes never exist twice.
    """
    plain: dict[str, Any] = {}
    for name in _NAMES[type(value)]:
        item = getattr(value, name)
        if name == "agents" and item:
            item = [agent_plain(each) for each in item]
        elif name in _KEEP_EMPTY:
            if item is None:
                continue
        elif item is None or item is False or (isinstance(item, (tuple, dict)) and not item):
            continue
        plain[name] = item
    return plain


_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in (Reading, DeviceReading, ProcessFacts)}

_KEEP_EMPTY = frozenset(
    "processes process_utilization activity limits hidden host_pid_namespace leader_alive uses_gpu cgroup"
    " libraries".split()
)
"""These fields keep an empty value, because an empty result of a query differs from "not known".
"""
