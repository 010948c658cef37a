"""Declare all that the accounting remembers between samples, and move it with the host's clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from vramledger.accounting.agents.agent_figures import AgentsState
from vramledger.accounting.devices import DevicesState
from vramledger.accounting.holders.holding_table import HoldingTableState
from vramledger.accounting.holders.processes import ProcessesState
from vramledger.accounting.owners.out_of_memory import OomsState
from vramledger.accounting.owners.owner_usage import UsageState
from vramledger.accounting.uncharged.events import UnchargedState
from vramledger.accounting.work.busy_without_work import BusyWithoutWorkState
from vramledger.accounting.work.device_work import DeviceWorkState
from vramledger.accounting.work.ghost import GhostState
from vramledger.accounting.work.thread_times import ThreadTimesState
from vramledger.model.snapshot import UnixTime


def _part(kind: type[Any]) -> Any:  # noqa: ANN401 a field of that kind
    return msgspec.field(default_factory=kind)


class Remembered(msgspec.Struct):
    """All that the accounting remembers."""

    serial: int = 0  # how many readings there were
    failures: dict[str, int] = {}  # how many of them failed, by reason
    devices: DevicesState = _part(DevicesState)  # which devices exist
    ooms: OomsState = _part(OomsState)  # failed allocations
    # which holding is which, and how long each was quiet
    holdings: HoldingTableState = _part(HoldingTableState)
    processes: ProcessesState = _part(ProcessesState)  # facts, orphans and policies
    owners: UsageState = _part(UsageState)  # byte-seconds, and what was freed
    agents: AgentsState = _part(AgentsState)  # what agents have reported
    ghosts: GhostState = _part(GhostState)  # devices that are busy without a process
    work: DeviceWorkState = _part(DeviceWorkState)  # what each device did
    threads: ThreadTimesState = _part(ThreadTimesState)  # since when the threads of holders have been quiet
    waits: BusyWithoutWorkState = _part(BusyWithoutWorkState)  # devices that are busy without work
    uncharged: UnchargedState = _part(UnchargedState)  # what NVML charges to nobody
    last: float | None = None  # monotonic time of the newest sample
    boot_time: float | None = None  # Unix time of boot, as of that sample
    watched_since: UnixTime | None = None  # the first sample

    def since_start(self) -> Remembered:
        """Return what is counted since the exporter started, and nothing else."""
        return Remembered(
            serial=self.serial,
            failures=self.failures,
            devices=DevicesState(xids=self.devices.xids),
            ooms=self.ooms,
        )


def follow_clock(state: Remembered, seconds: float) -> Remembered:
    """Return a state whose Unix times are moved along with a clock that was set, so that every span stays."""
    moved: Remembered = _mover_of_all()(state, seconds)
    return moved


_Mover = Callable[[Any, float], Any]
"""Returns a value whose Unix times are moved by some seconds."""


@cache
def _mover_of_all() -> _Mover:
    found = _mover(inspect.type_info(Remembered))
    assert found is not None  # noqa: S101 it has Unix times
    return found


def _mover(kind: inspect.Type) -> _Mover | None:  # noqa: PLR0911 a return a kind of type
    """Return what moves the values of a declared type; None if they have no Unix time."""
    if isinstance(kind, inspect.Metadata):
        is_unix = (kind.extra or {}).get("clock") == "unix"
        return (lambda value, by: value + by) if is_unix else _mover(kind.type)
    if isinstance(kind, inspect.UnionType):
        movers = [each for each in map(_mover, kind.types) if each is not None]
        return _optional(*movers) if movers else None
    if isinstance(kind, inspect.TupleType):
        return _of_tuple([_mover(each) for each in kind.item_types])
    if isinstance(kind, inspect.ListType):
        return _of_list(_mover(kind.item_type))
    if isinstance(kind, inspect.DictType):
        return _of_dict(_mover(kind.value_type))
    if isinstance(kind, inspect.StructType):
        return _of_object(msgspec.structs.replace, kind.fields)
    if isinstance(kind, inspect.DataclassType):
        return _of_object(dataclasses.replace, kind.fields)
    if isinstance(kind, inspect.NamedTupleType):
        return _of_object(lambda value, **changes: value._replace(**changes), kind.fields)
    return None


def _optional(mover: _Mover) -> _Mover:
    return lambda value, by: None if value is None else mover(value, by)


def _of_tuple(movers: list[_Mover | None]) -> _Mover | None:
    if not any(movers):
        return None
    return lambda value, by: tuple(
        each if mover is None else mover(each, by) for mover, each in zip(movers, value, strict=True)
    )


def _of_list(mover: _Mover | None) -> _Mover | None:
    return None if mover is None else lambda value, by: [mover(each, by) for each in value]


def _of_dict(mover: _Mover | None) -> _Mover | None:
    return None if mover is None else lambda value, by: {key: mover(each, by) for key, each in value.items()}


def _of_object(replace: Callable[..., Any], fields: Iterable[inspect.Field]) -> _Mover | None:
    movers = {each.name: mover for each in fields if (mover := _mover(each.type)) is not None}
    if not movers:
        return None
    return lambda value, by: replace(
        value, **{name: mover(getattr(value, name), by) for name, mover in movers.items()}
    )
