"""Declare all that the accounting remembers between samples, and move it with the host's clock."""

from __future__ import annotations

import msgspec
from msgspec import inspect

from vramledger.accounting.agent_figures import AgentHistory
from vramledger.accounting.devices import DevicesState
from vramledger.accounting.holders.matching import HoldingTableState
from vramledger.accounting.holders.processes import TrackedProcess
from vramledger.accounting.owners.failed_allocations import OomsState
from vramledger.accounting.owners.owner_usage import DeviceUsageState
from vramledger.accounting.sample import Clock
from vramledger.accounting.uncharged.events import PoolState
from vramledger.accounting.work.busy_without_work import Span
from vramledger.accounting.work.device_work import DeviceWork
from vramledger.accounting.work.thread_times import ThreadQuiet
from vramledger.model.records import mover_of
from vramledger.model.snapshot import UnixTime


class Remembered(msgspec.Struct):
    """All that the accounting remembers."""

    serial: int = 0  # how many readings there were
    failures: dict[str, int] = {}  # how many of them failed, by reason
    devices: DevicesState = msgspec.field(default_factory=DevicesState)  # which devices exist
    ooms: OomsState = msgspec.field(default_factory=OomsState)  # failed allocations
    # which holding is which, and how long each was quiet
    holdings: HoldingTableState = msgspec.field(default_factory=HoldingTableState)
    processes: dict[int, dict[int, TrackedProcess]] = {}  # facts and policies, by pid and start
    owners: dict[str, DeviceUsageState] = {}  # byte-seconds, and what was freed, by UUID
    agents: dict[int, dict[int, AgentHistory]] = {}  # what each has reported, by pid and start
    ghosts: dict[str, Clock] = {}  # since when devices, by UUID, are busy without a process
    work: dict[str, DeviceWork] = {}  # what each device did, by UUID
    # since when the threads of holders have been quiet, by pid and start
    threads: dict[int, dict[int, ThreadQuiet]] = {}
    waits: dict[str, Span] = {}  # the time in which devices, by UUID, are busy without work
    uncharged: dict[str, PoolState] = {}  # what NVML charges to nobody, by the UUID of the pool
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
    moved: Remembered = mover_of(Remembered, _is_unix_time)(state, seconds)
    return moved


def _is_unix_time(_: str, kind: inspect.Type) -> bool:
    return isinstance(kind, inspect.Metadata) and (kind.extra or {}).get("clock") == "unix"
