"""A simulated node with GPUs and holders, as the series that its exporter would give Prometheus.

Minutes count from the start of the test, which promtool puts at Unix time 0; what began before is negative.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

from msgspec.structs import replace

from tests.support import builders
from tests.support.faults import rules
from tests.support.host.model import GIB
from tests.support.host.scrapes import Renderer
from tests.support.host.series import Values as Written
from vramledger.model import snapshot
from vramledger.model.agent_report import AgentReport
from vramledger.model.reading import DeviceReading, MemoryReading, Owner, ProcessFacts, Rank

_FAMILIES = rules.families()
_STAMP = "vramledger_sample_timestamp_seconds"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
STEP = 15
"""Seconds between two scrapes."""

Values = float | Callable[[float], float | None] | None
"""A value, or one for each minute; None where the series has no sample."""


def value_at(values: Values, minute: float) -> float | None:
    return values(minute) if callable(values) else values


def changing_at(minute: float, before: float | None, after: float | None) -> Callable[[float], float | None]:
    return lambda now: before if now < minute else after


@dataclass(frozen=True, eq=False)
class Holder:
    """What one process holds on one device, in GiB, and everything that the exporter says about it."""

    pid: int
    gib: Values
    state: str | Callable[[float], str] = "active"  # name of the state, or one for each minute
    since: Values = -600  # minute since when; for a state that changes, one for each minute
    gpu: int = 0
    sm: Values = 0.5  # SM utilisation, None for no sample
    last_active: Values = None  # minute of the last sign of work, None for none
    start: Values = -600  # minute at which the process started
    user: str = "ann"
    command: str = "train.py"
    framework: str = "torch"
    policy: str = "caching"
    owner_type: str = "user"
    owner: str = "ann"
    notebook: str = ""
    agent: Mapping[str, Values] = field(default_factory=dict)  # its figures, by family
    agent_up: Values = None
    grade: snapshot.Grade = snapshot.Grade.PROVEN  # how good the evidence for its state is
    managed: Values = None  # GiB of managed memory that it has besides ``gib``
    left: Values = None  # GiB that an ended process has left it
    most: float | None = None  # GiB of both that it can have at most, None where it has them for certain
    uncharged_grade: snapshot.Grade = snapshot.Grade.SEEN  # how good the evidence for them is
    rank: Rank | None = None  # which rank of a distributed job it is
    waiting: Values = None  # minute since when it keeps its device busy without work

    def __post_init__(self) -> None:
        """Assume an agent if a report is given."""
        if self.agent and self.agent_up is None:
            object.__setattr__(self, "agent_up", 1)


@dataclass(frozen=True)
class Node:
    holders: Collection[Holder] = ()
    gpus: int = 1
    total: float = 100  # GiB of each device
    unattributed: Values = 0
    unknown: Values = 0
    missing: Callable[[float], bool] = lambda _: False  # minutes at which the exporter does not answer
    # Further series, or other values for those that are here, by what stands in a rule file's test.
    extra: Mapping[str, Values] = field(default_factory=dict)
    driver_up: Values = 1  # values of vramledger_up
    instance: str = "gpu-1:10839"
    # Changes the labels of a series at a minute, as a reboot or a change of the target does.
    relabel: Callable[[float, Mapping[str, str]], Mapping[str, str]] | None = None
    every: int = STEP  # seconds from one scrape to the next, a multiple of STEP

    def series(self, minutes: float) -> list[dict[str, str]]:
        """Return the node's series over so many minutes as promtool takes them."""
        target = f'job="vramledger",instance="{self.instance}"'
        extra = {_key(name.replace("NODE", target)): values for name, values in self.extra.items()}
        named = {_key(name.replace("NODE", target)): name.replace("NODE", target) for name in self.extra}
        renderer, pages = Renderer(_FAMILIES), dict[object, dict[_Key, str]]()
        found: dict[_Key, Written] = {}
        slots = int(minutes * 60 / self.every) + 1
        for step in range(slots):
            minute = step * self.every / 60
            up = not self.missing(minute)
            values: dict[_Key, str] = {}
            if up:
                state = self._state(minute)
                if state not in pages:
                    pages[state] = dict(_targeted(renderer.lines(_snapshot(*state)), target))
                values = {**pages[state], _key(f"{_STAMP}{{{target}}}"): f"{minute * 60:.17g}"}
                for key, each in extra.items():
                    value = value_at(each, minute)
                    values.pop(key, None)
                    if value is not None:
                        values[key] = f"{value:.17g}"
            target_up = _key(f"up{{{target}}}")
            known = value_at(extra.get(target_up, float(up)), minute)
            values.pop(target_up, None)
            if known is not None:  # Prometheus has the target
                values[target_up] = f"{known:.17g}"
            for (name, labels), text in values.items():
                if self.relabel is not None:
                    labels = frozenset(self.relabel(minute, dict(labels)).items())  # noqa: PLW2901
                written = found.get((name, labels))
                if written is None:
                    written = found[name, labels] = Written(step)
                written.note(step, text)
        return [
            {"series": named.get(key) or _text(key), "values": _apart(each.text(slots), self.every // STEP)}
            for key, each in found.items()
        ]

    def page(self, renderer: Renderer, minute: float) -> list[str]:
        """Return the lines that the exporter answers with at a minute, without regard to ``missing``."""
        own = {name.replace("{NODE,", "{").replace("{NODE}", ""): of for name, of in self.extra.items()}
        lines = renderer.lines(_snapshot(*self._state(minute)))
        given = {name: value_at(values, minute) for name, values in own.items()}
        return [
            *(line for line in lines if line.rpartition(" ")[0] not in {*own, _STAMP}),
            *(f"{name} {value:.17g}" for name, value in given.items() if value is not None),
            f"{_STAMP} {minute * 60:.17g}",
        ]

    def _state(self, minute: float) -> tuple[_NodeState, tuple[tuple[Holder, _HolderState], ...]]:
        """Return every value that there is at a minute."""
        holders = tuple(
            (
                holder,
                _HolderState(
                    round(gib * GIB),
                    holder.state(minute) if callable(holder.state) else holder.state,
                    value_at(holder.since, minute) or 0.0,
                    value_at(holder.sm, minute),
                    value_at(holder.last_active, minute),
                    value_at(holder.waiting, minute),
                    value_at(holder.start, minute) or 0.0,
                    value_at(holder.agent_up, minute),
                    tuple((name, value_at(values, minute)) for name, values in holder.agent.items()),
                    _uncharged(holder, minute),
                ),
            )
            for holder in self.holders
            if (gib := value_at(holder.gib, minute)) is not None
        )
        device = (value_at(self.unattributed, minute) or 0.0, value_at(self.unknown, minute) or 0.0)
        return _NodeState(self.gpus, self.total, *device, bool(value_at(self.driver_up, minute))), holders


def _apart(values: str, steps: int) -> str:
    """Return values in promtool's notation so many steps apart."""
    if steps == 1:
        return values
    gap = f"_x{steps - 1}"
    apart = []
    for each in values.split():
        value, _, times = each.partition("x")
        one = value.removesuffix("+0")
        apart += [one, gap] * (int(times or 0) + (one != value or not times))
    return " ".join(apart)


class _NodeState(NamedTuple):
    gpus: int
    total: float
    unattributed: float
    unknown: float
    driver_up: bool


class _HolderState(NamedTuple):
    memory: int
    state: str
    since: float
    sm: float | None
    last_active: float | None
    waiting: float | None
    start: float
    agent_up: float | None
    agent: tuple[tuple[str, float | None], ...]
    uncharged: snapshot.UnchargedBytes | None

    @property
    def held(self) -> int:
        return self.memory + (0 if self.uncharged is None else self.uncharged.least)


def _uncharged(holder: Holder, minute: float) -> snapshot.UnchargedBytes | None:
    managed, left = value_at(holder.managed, minute), value_at(holder.left, minute)
    if managed is None and left is None and holder.most is None:
        return None
    moved, least = round((managed or 0) * GIB), round(((managed or 0) + (left or 0)) * GIB)
    most = least if holder.most is None else round(holder.most * GIB)
    return snapshot.UnchargedBytes(least, most, moved, holder.uncharged_grade, "")


_Key = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a series, in any order of the labels."""


@cache  # a series is in hundreds of pages
def _key(series: str) -> _Key:
    name, _, labels = series.partition("{")
    return name, frozenset(_LABEL.findall(labels))


def _text(key: _Key) -> str:
    name, labels = key
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels)) + "}"


def _targeted(lines: Iterable[str], target: str) -> Iterator[tuple[_Key, str]]:
    """Yield the series of a page with the labels of their target, and their values."""
    for line in lines:
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        yield _key(f"{name}{{{target},{labels}"), value


def _snapshot(node: _NodeState, holders: Sequence[tuple[Holder, _HolderState]]) -> snapshot.Snapshot:
    """Return the exporter's samples of a node with these holders."""
    if not node.driver_up:
        return builders.failed("driver-lost", "the driver does not answer")
    found = builders.snapshot(
        *(_device(gpu, node, [each for each in holders if each[0].gpu == gpu]) for gpu in range(node.gpus)),
        processes=[_process(*each) for each in holders],
    )
    agents = {holder.pid: _agent(holder, state) for holder, state in holders if state.agent_up is not None}
    collectors = dict.fromkeys(("ledger", "process"), (True, 0.001))
    return replace(found, agents=agents, collectors=collectors)


def _device(
    gpu: int, node: _NodeState, holders: Sequence[tuple[Holder, _HolderState]]
) -> snapshot.DeviceSnapshot:
    held, owned = Counter[snapshot.State](), dict[tuple[str, str], Counter[snapshot.State]]()
    holdings = []
    for holder, state in holders:
        kind = snapshot.State(state.state)
        held[kind] += state.held
        owned.setdefault((holder.owner_type, holder.owner), Counter())[kind] += state.held
        since, active = state.since * 60, None if state.last_active is None else state.last_active * 60
        waiting = None if state.waiting is None else state.waiting * 60
        seen = builders.holding(
            holder.pid, state.memory, kind, uncharged=state.uncharged, sm=state.sm, last_active=active, why=""
        )
        said = replace(seen, start=1, since=since, grade=holder.grade, working=None)
        holdings.append(replace(said, busy_without_work_since=waiting))
    held[snapshot.State.UNKNOWN] += round(node.unknown * GIB)
    total, unattributed = round(node.total * GIB), round(node.unattributed * GIB)
    states = {state: held[state] for state in snapshot.State}
    free = total - sum(held.values()) - unattributed
    owners = tuple(
        snapshot.OwnerUsage(*owner, kinds, {}, None, 0, 0) for owner, kinds in sorted(owned.items())
    )
    return snapshot.DeviceSnapshot(
        DeviceReading(gpu, uuid(gpu), "NVIDIA H200", memory=MemoryReading(total, free, total - free, 0)),
        up=True,
        ledger=snapshot.Ledger(total, free, None, states, unattributed, 0),
        holdings=tuple(holdings),
        hidden=(),
        owner_usage=snapshot.OwnerUsageTotals(owners, 0, 0.0),
    )


def _process(holder: Holder, state: _HolderState) -> snapshot.ProcessSnapshot:
    owner = Owner(holder.owner_type, holder.owner, notebook=holder.notebook)
    facts = ProcessFacts(
        holder.pid, 1, 1000, holder.user, command=holder.command, owner=owner, rank=holder.rank
    )
    settled = (holder.framework, holder.policy)
    return snapshot.ProcessSnapshot(holder.pid, state.start * 60, facts, facts, settled=settled)


def _agent(holder: Holder, state: _HolderState) -> snapshot.AgentSnapshot:
    if not state.agent_up:
        return snapshot.AgentSnapshot(up=False, problem="silent")
    figures = {
        _figure(name): round(value * (GIB if name.endswith("_bytes") else 1))
        for name, value in state.agent
        if value is not None
    }
    pools = {uuid(holder.gpu): (snapshot.Pool(holder.framework, 0, figures, {}),)} if figures else {}
    return snapshot.AgentSnapshot(up=True, report=AgentReport(sequence=1, interval=1.0), pools=pools)


def _figure(family: str) -> str:
    return family.partition("_")[2].removesuffix("_bytes").removesuffix("_total")


def uuid(gpu: int) -> str:
    return f"GPU-0000000{gpu}-0000-4000-8000-000000000000"
