"""Define an agent's report about its own process, and read its message strictly (wire format 1).

The sender is any program of any user, so only the form of a message can be checked: if a value has a wrong
type or size, the whole message is refused. A name that this version does not know is ignored, so that a newer
agent can report more. What is absent or null is not known.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, NamedTuple, NoReturn

from vramledger.agent_protocol.distributed_ranks import LONGEST_JOB, add_node, is_rank
from vramledger.agent_protocol.frameworks import REPORTING_FRAMEWORKS
from vramledger.agent_protocol.messages import (
    ALLOCATOR_SETTINGS,
    CATEGORIES,
    CONSENTS,
    FORMAT_VERSION,
    MAX_DEVICES,
    MAX_INTEGER,
    MAX_INTERVAL_SECONDS,
    MAX_MESSAGE_BYTES,
    MAX_PATH_CHARS,
    MAX_PROVIDERS,
    MAX_TEXT_CHARS,
    MAX_VISIBLE_CHARS,
    MIN_INTERVAL_SECONDS,
    OOM_VERDICTS,
    POLICIES,
    VISIBILITY_VARIABLES,
)
from vramledger.printable import printable


class DeviceReport(NamedTuple):
    """What a framework reports of one device, which it names by ``ordinal`` (its own number) or ``uuid``.

    ``managed`` are the bytes of its pool that are certainly managed memory, None where it does not know.
    """

    ordinal: int | None
    uuid: str | None
    figures: Mapping[str, int]
    categories: Mapping[str, int]
    managed: int | None = None


@dataclass(frozen=True, slots=True)
class FrameworkReport:
    """One framework in the process.

    Attributes:
        framework: its name.
        version: as it states it.
        supported: False where its allocator gives no statistics.
        allocator: the name of the allocator.
        policy: how it takes memory.
        devices: what it holds on each device.
        settings: those of its allocator, by the names of ``messages.ALLOCATOR_SETTINGS``.
        pinned: bytes of the host's memory that it has pinned for the GPUs.
        pinned_in_use: those of them that the program uses.
    """

    framework: str
    version: str | None = None
    supported: bool = True
    allocator: str | None = None
    policy: str | None = None
    devices: tuple[DeviceReport, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    pinned: int | None = None
    pinned_in_use: int | None = None


class GarbageReport(NamedTuple):
    """Python's cyclic collector: whether it is on, and how often it ran."""

    enabled: bool | None
    collections: int | None


class ReportedRank(NamedTuple):
    """Which of ``size`` ranks of a distributed job the process is; ``job`` is empty where it is not known."""

    number: int
    size: int
    job: str


class OutOfMemory(NamedTuple):
    """The newest failed allocation: Unix time, framework, device, bytes, reason; ``report`` is a path."""

    time: float
    framework: str
    ordinal: int | None
    requested: int | None
    verdict: str
    report: str | None


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One message: the full state of a process as its agent sees it.

    Attributes:
        sequence: grows by one with each report that was built, sent or not.
        dropped: reports that the socket would not take.
        agent: the agent's version.
        interval: seconds that it promises between reports.
        monotonic: CLOCK_BOOTTIME of the report, seconds.
        python: version of the interpreter.
        visible: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER when CUDA was initialised, each None when not
            set; None when not known.
        consents: the requests that it accepts.
        errors: failures so far, by provider.
        collector: see :class:`GarbageReport`.
        frameworks: those with an initialised allocator.
        last_oom: see :class:`OutOfMemory`.
        rank: see :class:`ReportedRank`; None where the program does not know it.
    """

    sequence: int
    interval: float
    dropped: int | None = None
    agent: str | None = None
    monotonic: float | None = None
    python: str | None = None
    visible: Mapping[str, str | None] | None = None
    consents: tuple[str, ...] = ()
    errors: Mapping[str, int] = field(default_factory=dict)
    collector: GarbageReport | None = None
    frameworks: tuple[FrameworkReport, ...] = ()
    last_oom: OutOfMemory | None = None
    rank: ReportedRank | None = None


class Agent(NamedTuple):
    """A connected process, as the kernel attests it, and its newest report.

    ``received`` is the Unix time of the newest report. ``problem`` is ``silent`` when that report is too old
    to be shown as current, or none ever came; ``refused`` when a message broke the format; otherwise empty.
    With a problem there is no ``report``.
    """

    pid: int
    start: int
    uid: int
    received: float | None
    problem: str
    report: AgentReport | None


class AgentSocket(NamedTuple):
    """The state of the agents' socket: whether it listens, its agents, and refusals so far by reason."""

    listening: bool
    connections: int
    rejected: Mapping[str, int]


class RefusedError(Exception):
    """Say that a message is refused, and for which ``reason`` of :data:`REASONS`."""

    def __init__(self, reason: str, about: str) -> None:
        super().__init__(about)
        self.reason = reason


REASONS = (
    "format",  # not a JSON object, or a value of the wrong kind
    "version",  # another wire format
    "size",  # longer than 64 KiB
    "limits",  # more devices or providers than allowed, a descriptor, or too much in all agents' reports
    "rate",  # more waited than are read at once, or too many before a report: read later, or never
    "connections",  # too many: refused, or closed for another
    "connections-of-user",  # too many of one user, or too fast
    "pid",  # the kernel does not report the peer's pid: it is outside our PID namespace
    "process",  # the peer had ended before we could look at it
    "sender",  # sent by another process than the one that connected: a forked child
    "mute",  # connected and sent nothing
)
"""Every value of the ``reason`` label of ``vramledger_agent_rejected_total``."""


def parse(data: bytes) -> dict[str, Any]:
    """Read a message as a JSON object of our version.

    Raises:
        RefusedError: it is not such an object.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        refuse("size", f"longer than {MAX_MESSAGE_BYTES} bytes")
    try:
        message = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        _bad(f"not JSON: {error}")
    if not isinstance(message, dict):
        _bad("not a JSON object")
    version = message.get("version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        refuse("version", f"version {version!r:.40}")
    return message


def read_report(message: Mapping[str, Any], same_frameworks: AgentReport | None = None) -> AgentReport:
    """Read a report out of a message.

    Args:
        message: the message.
        same_frameworks: a report that was read from a message with the same frameworks; they are not read
            again.

    Raises:
        RefusedError: something in it is not what it must be.
    """
    sequence = _count(message, "sequence")
    interval = _number(message, "interval")
    if sequence is None or interval is None or not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        _bad("sequence and interval are missing")
    frameworks = _frameworks(message) if same_frameworks is None else same_frameworks.frameworks
    return AgentReport(
        sequence=sequence,
        interval=interval,
        dropped=_count(message, "dropped"),
        agent=_text(message, "agent"),
        monotonic=_number(message, "monotonic"),
        python=_text(message, "python"),
        visible=_visible(message),
        consents=tuple(name for name in CONSENTS if name in _list(message, "consents")),
        errors=_errors(message),
        collector=_collector(message),
        frameworks=frameworks,
        last_oom=_last_oom(message),
        rank=_rank(message),
    )


def frameworks_digest(message: Mapping[str, Any]) -> int | None:
    """Return a number for what a message says of frameworks; None where it is nested too deep.

    It is kept instead of that part of the message, which can take twenty times as much memory as its text.
    """
    try:
        # Version 2: later ones write equal values differently.
        return hash(marshal.dumps(message.get("frameworks"), 2))
    except ValueError:
        return None


def _frameworks(message: Mapping[str, Any]) -> tuple[FrameworkReport, ...]:
    frameworks = tuple(
        _framework(each)
        for each in _list(message, "frameworks")
        if isinstance(each, dict)
        and isinstance(each.get("framework"), str)
        and each["framework"] in REPORTING_FRAMEWORKS
    )
    if len({each.framework for each in frameworks}) < len(frameworks):
        _bad("a framework is listed twice")
    if sum(len(each.devices) for each in frameworks) > MAX_DEVICES:
        refuse("limits", f"more than {MAX_DEVICES} devices")
    return frameworks


def locate_rank(report: AgentReport, node: str) -> AgentReport:
    """Return a report that names the node in the job, if its ranks meet at an address local to a node."""
    rank = report.rank
    if rank is None or (job := add_node(rank.job, node)) == rank.job:
        return report
    return replace(report, rank=rank._replace(job=job))


def plain(report: AgentReport) -> dict[str, Any]:
    """Write a report as the message that :func:`read_report` reads."""
    return {
        "version": FORMAT_VERSION,
        "sequence": report.sequence,
        "interval": report.interval,
        "dropped": report.dropped,
        "agent": report.agent,
        "monotonic": report.monotonic,
        "python": report.python,
        "visible": None if report.visible is None else dict(report.visible),
        "consents": list(report.consents),
        "errors": dict(report.errors),
        "collector": None if report.collector is None else report.collector._asdict(),
        "frameworks": [
            {
                "framework": each.framework,
                "version": each.version,
                "supported": each.supported,
                "allocator": each.allocator,
                "policy": each.policy,
                "settings": dict(each.settings),
                "pinned": each.pinned,
                "pinned_in_use": each.pinned_in_use,
                "devices": [
                    {
                        "ordinal": device.ordinal,
                        "uuid": device.uuid,
                        **device.figures,
                        "categories": dict(device.categories),
                        "managed": device.managed,
                    }
                    for device in each.devices
                ],
            }
            for each in report.frameworks
        ],
        "last_oom": None if report.last_oom is None else report.last_oom._asdict(),
        "rank": None if report.rank is None else report.rank._asdict(),
    }


def _framework(raw: dict[str, Any]) -> FrameworkReport:
    name = raw["framework"]
    supported = raw.get("supported", True)
    if not isinstance(supported, bool):
        _bad("supported must be true or false")
    policy = _text(raw, "policy")
    devices = tuple(_device(name, each) for each in _list(raw, "devices"))
    for key in ("ordinal", "uuid"):
        named = [value for each in devices if (value := getattr(each, key)) is not None]
        if len(set(named)) < len(named):
            _bad("a device is listed twice")
    return FrameworkReport(
        framework=name,
        version=_text(raw, "version"),
        supported=supported,
        allocator=_text(raw, "allocator"),
        policy=policy if policy in POLICIES else None,
        devices=devices if supported else (),
        settings=_settings(raw),
        pinned=_count(raw, "pinned"),
        pinned_in_use=_count(raw, "pinned_in_use"),
    )


def _settings(raw: dict[str, Any]) -> dict[str, str]:
    found = _object(raw, "settings")
    return {
        name: value
        for name, form in ALLOCATOR_SETTINGS.items()
        if isinstance(value := found.get(name), str) and re.fullmatch(form, value)
    }


def _device(framework: str, raw: object) -> DeviceReport:
    if not isinstance(raw, dict):
        _bad("a device must be an object")
    declared = REPORTING_FRAMEWORKS[framework]
    ordinal, uuid = _count(raw, "ordinal"), _text(raw, "uuid")
    if ordinal is None and uuid is None:
        _bad("a device must have an ordinal or a uuid")
    figures = {name: value for name in declared.figures if (value := _count(raw, name)) is not None}
    parts = _object(raw, "categories")
    categories = {name: value for name in CATEGORIES if (value := _count(parts, name)) is not None}
    managed = _count(raw, "managed")
    return DeviceReport(ordinal, uuid, figures, categories if declared.has_categories else {}, managed)


def _visible(message: Mapping[str, Any]) -> dict[str, str | None] | None:
    raw = message.get("visible")
    if raw is None:
        return None
    found = _object(message, "visible")
    if VISIBILITY_VARIABLES[0] not in found:
        return None
    texts = [value for name in VISIBILITY_VARIABLES if isinstance(value := found.get(name), str)]
    if any(len(text) > MAX_VISIBLE_CHARS for text in texts):
        return None  # a list that is cut would name other devices
    return {name: _text(found, name, longest=MAX_VISIBLE_CHARS) for name in VISIBILITY_VARIABLES}


def _errors(message: Mapping[str, Any]) -> dict[str, int]:
    raw = _object(message, "errors")
    if len(raw) > MAX_PROVIDERS:
        refuse("limits", f"more than {MAX_PROVIDERS} providers")
    return {
        name: value
        for name in raw
        if re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name) and (value := _count(raw, name)) is not None
    }


def _collector(message: Mapping[str, Any]) -> GarbageReport | None:
    if message.get("collector") is None:
        return None
    raw = _object(message, "collector")
    enabled = raw.get("enabled")
    if not isinstance(enabled, (bool, type(None))):
        _bad("enabled must be true or false")
    return GarbageReport(enabled, _count(raw, "collections"))


def _rank(message: Mapping[str, Any]) -> ReportedRank | None:
    """Return the rank; None for a job of a single rank, and where a part is missing or absurd."""
    if message.get("rank") is None:
        return None
    raw = _object(message, "rank")
    number, size, job = _count(raw, "number"), _count(raw, "size"), _text(raw, "job", longest=LONGEST_JOB)
    if number is None or size is None or not is_rank(number, size):
        return None
    return ReportedRank(number, size, job or "")


def _last_oom(message: Mapping[str, Any]) -> OutOfMemory | None:
    if message.get("last_oom") is None:
        return None
    raw = _object(message, "last_oom")
    time, framework, verdict = _number(raw, "time"), _text(raw, "framework"), _text(raw, "verdict")
    if time is None or framework is None or framework not in REPORTING_FRAMEWORKS:
        return None
    return OutOfMemory(
        time,
        framework,
        _count(raw, "ordinal"),
        _count(raw, "requested"),
        verdict if verdict is not None and verdict in OOM_VERDICTS else "unknown",
        _text(raw, "report", longest=MAX_PATH_CHARS),
    )


def _count(raw: Mapping[str, Any], name: str) -> int | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INTEGER:
        _bad(f"{name} must be a whole number of 0 or more")
    return value


def _number(raw: Mapping[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_INTEGER:
        _bad(f"{name} must be a number of 0 or more")
    if not isfinite(value):
        _bad(f"{name} must be a finite number")
    return float(value)


def _text(raw: Mapping[str, Any], name: str, *, longest: int = MAX_TEXT_CHARS) -> str | None:
    """Return a text that is cut to the maximum length and cannot control a terminal or break an encoding."""
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        _bad(f"{name} must be a text")
    return printable(value[:longest])


def _list(raw: Mapping[str, Any], name: str) -> list[Any]:
    value = raw.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        _bad(f"{name} must be a list")
    return value


def _object(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = raw.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        _bad(f"{name} must be an object")
    return value


def refuse(reason: str, about: str) -> NoReturn:
    """Refuse a message or its sender."""
    raise RefusedError(reason, about)


def _bad(about: str) -> NoReturn:
    refuse("format", about)


def _no_number(text: str) -> NoReturn:
    message = f"{text} is not a number"
    raise ValueError(message)
