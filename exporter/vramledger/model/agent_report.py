"""Declare an agent's report about its own process, and read its message strictly (wire format 1).

The sender is any program of any user, so only the form of a message can be checked: if a value has a wrong
type or size, the whole message is refused. A name that this version does not know is ignored, so that a newer
agent can report more. What is absent or null is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

from msgspec import Meta, Struct, ValidationError, convert, defstruct, to_builtins
from msgspec.structs import force_setattr, replace

from vramledger_agent.printable import printable
from vramledger_agent.protocol import messages
from vramledger_agent.protocol.distributed_ranks import LONGEST_JOB, add_node, is_rank
from vramledger_agent.protocol.frameworks import REPORTING_FRAMEWORKS

Count = Annotated[int, Meta(ge=0, le=messages.MAX_INTEGER)]
Seconds = Annotated[float, Meta(ge=0, le=messages.MAX_INTEGER)]
Interval = Annotated[float, Meta(ge=messages.MIN_INTERVAL_SECONDS, le=messages.MAX_INTERVAL_SECONDS)]

FIGURES = tuple(dict.fromkeys(name for each in REPORTING_FRAMEWORKS.values() for name in each.figures))
"""The names of all figures that a framework may report of a device."""

_FIGURES_OF_OTHERS = {
    each.name: tuple(name for name in FIGURES if name not in each.figures)
    for each in REPORTING_FRAMEWORKS.values()
}


def _tidy(report: Struct, *names: str, longest: int = messages.MAX_TEXT_CHARS) -> None:
    """Cut these texts to the maximum length; they cannot control a terminal or break an encoding then."""
    for name in names:
        text = getattr(report, name)
        if text is not None and (shown := printable(text[:longest])) != text:
            force_setattr(report, name, shown)


class _DeviceFigures(Struct, frozen=True, omit_defaults=True):
    """What a framework reports of one device, which it names by ``ordinal`` (its own number) or ``uuid``.

    ``managed`` are the bytes of its pool that are certainly managed memory. None is not known.
    """

    ordinal: Count | None = None
    uuid: str | None = None
    categories: Mapping[str, Count] = {}
    managed: Count | None = None

    def __post_init__(self) -> None:
        if self.ordinal is None and self.uuid is None:
            raise ValueError("a device must have an ordinal or a uuid")
        _tidy(self, "uuid")
        if self.categories:
            known = {name: self.categories[name] for name in messages.CATEGORIES if name in self.categories}
            force_setattr(self, "categories", known)

    @property
    def figures(self) -> dict[str, int]:
        return {name: value for name in FIGURES if (value := getattr(self, name)) is not None}


if TYPE_CHECKING:

    class DeviceReport(_DeviceFigures, frozen=True):
        """A report of a device, with a field for each of :data:`FIGURES`."""

        def __init__(
            self,
            ordinal: int | None = None,
            uuid: str | None = None,
            categories: Mapping[str, int] = ...,
            managed: int | None = None,
            **figures: int | None,
        ) -> None: ...

else:
    DeviceReport = defstruct(
        "DeviceReport",
        [(name, Count | None, None) for name in FIGURES],
        bases=(_DeviceFigures,),
        module=__name__,
        frozen=True,
        omit_defaults=True,
    )


class FrameworkReport(Struct, frozen=True, omit_defaults=True):
    """One framework in the process."""

    framework: str
    version: str | None = None  # as it states it
    supported: bool = True  # False where its allocator gives no statistics
    allocator: str | None = None  # the name of the allocator
    policy: str | None = None  # how it takes memory
    devices: tuple[DeviceReport, ...] = ()  # what it holds on each device
    # those of its allocator, by the names of ``messages.ALLOCATOR_SETTINGS``
    settings: Mapping[str, str] = {}
    pinned: Count | None = None  # bytes of the host's memory that it has pinned for the GPUs
    pinned_in_use: Count | None = None  # those of them that the program uses

    def __post_init__(self) -> None:
        _tidy(self, "version", "allocator")
        for key in ("ordinal", "uuid"):
            named = [value for each in self.devices if (value := getattr(each, key)) is not None]
            if len(set(named)) < len(named):
                raise ValueError("a device is listed twice")
        if self.policy is not None and self.policy not in messages.POLICIES:
            force_setattr(self, "policy", None)
        if self.settings:
            forms = messages.ALLOCATOR_SETTINGS.items()
            known = {name: self.settings[name] for name, form in forms if name in self.settings}
            known = {
                name: text
                for name, text in known.items()
                if re.fullmatch(messages.ALLOCATOR_SETTINGS[name], text)
            }
            force_setattr(self, "settings", known)
        devices = tuple(map(self._declared, self.devices)) if self.supported else ()
        force_setattr(self, "devices", devices)

    def _declared(self, device: DeviceReport) -> DeviceReport:
        framework = REPORTING_FRAMEWORKS.get(self.framework)
        if framework is None:
            return device
        if device.categories and not framework.has_categories:
            device = replace(device, categories={})
        others = _FIGURES_OF_OTHERS[self.framework]
        foreign = [name for name in others if getattr(device, name) is not None]
        return replace(device, **dict.fromkeys(foreign)) if foreign else device


class GarbageReport(Struct, frozen=True):
    """Python's cyclic collector: whether it is on, and how often it ran."""

    enabled: bool | None = None
    collections: Count | None = None


class ReportedRank(Struct, frozen=True):
    """Which of ``size`` ranks of a distributed job the process is; ``job`` is empty where it is not known."""

    number: Count = -1  # not said, and no rank is this one
    size: Count = 0
    job: str = ""

    def __post_init__(self) -> None:
        _tidy(self, "job", longest=LONGEST_JOB)


class OutOfMemory(Struct, frozen=True):
    """The newest failed allocation: Unix time, framework, device, bytes, reason; ``report`` is a path."""

    time: Seconds
    framework: str
    ordinal: Count | None = None
    requested: Count | None = None
    verdict: str = "unknown"
    report: str | None = None

    def __post_init__(self) -> None:
        _tidy(self, "report", longest=messages.MAX_PATH_CHARS)
        if self.verdict not in messages.OOM_VERDICTS:
            force_setattr(self, "verdict", "unknown")


class AgentReport(Struct, frozen=True, omit_defaults=True):
    """One message: the full state of a process as its agent sees it."""

    sequence: Count  # grows by one with each report that was built, sent or not
    interval: Interval  # seconds that it promises between reports
    dropped: Count | None = None  # reports that the socket would not take
    agent: str | None = None  # the agent's version
    monotonic: Seconds | None = None  # CLOCK_BOOTTIME of the report, seconds
    python: str | None = None  # version of the interpreter
    # CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER when CUDA was initialised, each None when not set; None when
    # not known
    visible: Mapping[str, str | None] | None = None
    consents: tuple[str, ...] = ()  # the requests that it accepts
    errors: Mapping[str, Count] = {}  # failures so far, by provider
    collector: GarbageReport | None = None  # see :class:`GarbageReport`
    frameworks: tuple[FrameworkReport, ...] = ()  # those with an initialised allocator
    last_oom: OutOfMemory | None = None  # see :class:`OutOfMemory`
    rank: ReportedRank | None = None  # see :class:`ReportedRank`; None where the program does not know it

    def __post_init__(self) -> None:
        _tidy(self, "agent", "python")
        known = tuple(each for each in self.frameworks if each.framework in REPORTING_FRAMEWORKS)
        if len(known) < len(self.frameworks):  # in a recording of another version, or by a stranger
            force_setattr(self, "frameworks", known)
        if len(self.errors) > messages.MAX_PROVIDERS:
            refuse("limits", f"more than {messages.MAX_PROVIDERS} providers")
        if len({each.framework for each in self.frameworks}) < len(self.frameworks):
            _bad("a framework is listed twice")
        if sum(len(each.devices) for each in self.frameworks) > messages.MAX_DEVICES:
            refuse("limits", f"more than {messages.MAX_DEVICES} devices")
        if self.errors:
            errors = {name: count for name, count in self.errors.items() if _PROVIDER.fullmatch(name)}
            force_setattr(self, "errors", errors)
        if self.consents:
            force_setattr(
                self, "consents", tuple(name for name in messages.CONSENTS if name in self.consents)
            )
        if self.visible is not None:
            force_setattr(self, "visible", _known_visible(self.visible))
        if self.last_oom is not None and self.last_oom.framework not in REPORTING_FRAMEWORKS:
            force_setattr(self, "last_oom", None)
        if self.rank is not None and not is_rank(self.rank.number, self.rank.size):
            force_setattr(self, "rank", None)  # also that of a job of a single rank


_PROVIDER = re.compile(r"[a-z][a-z0-9_]{0,31}")


def _known_visible(told: Mapping[str, str | None]) -> dict[str, str | None] | None:
    """Return the variables; None where a text is too long: a list that is cut would name other devices."""
    texts = {name: told.get(name) for name in messages.VISIBILITY_VARIABLES}
    if messages.VISIBILITY_VARIABLES[0] not in told or any(
        len(text) > messages.MAX_VISIBLE_CHARS for text in texts.values() if text is not None
    ):
        return None
    return {name: None if text is None else printable(text) for name, text in texts.items()}


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
    """Read a message as a JSON object of our version. Raises RefusedError if it is not such an object."""
    if len(data) > messages.MAX_MESSAGE_BYTES:
        refuse("size", f"longer than {messages.MAX_MESSAGE_BYTES} bytes")
    try:
        # Not msgspec: a path with other bytes than UTF-8 is half a surrogate pair here, which that refuses.
        message = json.loads(data.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        _bad(f"not JSON: {error}")
    if not isinstance(message, dict):
        _bad("not a JSON object")
    version = message.get("version")
    if version != messages.FORMAT_VERSION or isinstance(version, bool):
        refuse("version", f"version {version!r:.40}")
    return message


def read_report(message: Mapping[str, Any], before: AgentReport | None = None) -> AgentReport:
    """Read a report; frameworks equal to those ``before`` are the same objects. Raises RefusedError."""
    told = dict(message)
    if isinstance(listed := told.get("frameworks"), list):
        told["frameworks"] = [each for each in listed if _is_known(each)]
    try:
        try:
            report = convert(told, AgentReport)
        except (ValidationError, UnicodeEncodeError):  # perhaps only for what we need not understand
            report = convert(_known_part(told), AgentReport)
    except (ValidationError, RecursionError, UnicodeEncodeError) as error:
        _bad(str(error))
    if before is not None and before.frameworks == report.frameworks:
        force_setattr(report, "frameworks", before.frameworks)
    return report


def _is_known(framework: object) -> bool:
    name = framework.get("framework") if isinstance(framework, dict) else None
    return isinstance(name, str) and name in REPORTING_FRAMEWORKS


def _known_part(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without null, and without the names, texts and settings that are of another version.

    What is of the wrong kind otherwise stays, so that the message is refused.
    """
    told: dict[str, Any] = _without_null(_only(message, AgentReport.__struct_fields__))
    told["visible"] = _only(
        message.get("visible"), messages.VISIBILITY_VARIABLES
    )  # null: the variable is not set
    if isinstance(errors := told.get("errors"), dict):
        told["errors"] = _only(errors, filter(_PROVIDER.fullmatch, errors))
    if isinstance(consents := told.get("consents"), list):
        told["consents"] = [each for each in consents if isinstance(each, str)]
    if isinstance(oom := told.get("last_oom"), dict) and not {"time", "framework"} <= oom.keys():
        del told["last_oom"]
    frameworks = told.get("frameworks")
    for framework in frameworks if isinstance(frameworks, list) else ():
        if isinstance(settings := framework.get("settings"), dict):
            texts = [name for name in messages.ALLOCATOR_SETTINGS if isinstance(settings.get(name), str)]
            framework["settings"] = _only(settings, texts)
        if isinstance(devices := framework.get("devices"), list):
            figures = REPORTING_FRAMEWORKS[framework["framework"]].figures
            known = [_only(each, (*_DeviceFigures.__struct_fields__, *figures)) for each in devices]
            framework["devices"] = known
            for each in known:
                if isinstance(each, dict) and "categories" in each:
                    each["categories"] = _only(each["categories"], messages.CATEGORIES)
    return told


def _only(value: Any, names: Iterable[str]) -> Any:  # noqa: ANN401 JSON
    return {name: value[name] for name in names if name in value} if isinstance(value, Mapping) else value


def _without_null(value: Any) -> Any:  # noqa: ANN401 JSON
    """Return JSON values without what is null: it is not known, as if it was absent."""
    if isinstance(value, Mapping):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def locate_rank(report: AgentReport, node: str) -> AgentReport:
    """Return a report that names the node in the job, if its ranks meet at an address local to a node."""
    rank = report.rank
    if rank is None or (job := add_node(rank.job, node)) == rank.job:
        return report
    return replace(report, rank=replace(rank, job=job))


def plain(report: AgentReport) -> dict[str, Any]:
    """Write a report as the message that :func:`read_report` reads."""
    return {"version": messages.FORMAT_VERSION, **to_builtins(report)}


def refuse(reason: str, about: str) -> NoReturn:
    """Refuse a message or its sender."""
    raise RefusedError(reason, about)


def _bad(about: str) -> NoReturn:
    refuse("format", about)


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")
