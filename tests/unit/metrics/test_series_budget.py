"""The number of series of a host, and how many a change adds."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from tests.support.builders import crowd
from tests.support.host.one_holder import OneHolder
from vramledger.accounting.owners.owner_usage import Charge, DeviceUsage
from vramledger.config import COLLECTORS, OWNERS_MAX
from vramledger.metrics.exposition import Exposition, ScrapeRequest
from vramledger.model.snapshot import DeviceSnapshot, Reservation, ReservationStatus, Snapshot, State

DEFAULT = frozenset(name for name, (on, _) in COLLECTORS.items() if on)


def series(snapshot: Snapshot) -> set[str]:
    """Return all series of the default page, without their values."""
    page = Exposition(0, os.getppid).render(snapshot, ScrapeRequest(DEFAULT)).decode()
    return {line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")}


class Churn:
    """Devices whose owners are all replaced, again and again; each has been active and idle."""

    def __init__(self) -> None:
        self.full = crowd(8, 8)
        self.accounts = [DeviceUsage(OWNERS_MAX) for _ in self.full.devices]
        self.now = 0.0

    def turn(self, turn: int, after: float) -> Snapshot:
        """Let new owners hold all of the memory, active and then idle."""
        devices = self.full.devices
        for state in (State.ACTIVE, State.IDLE):
            self.now += after
            pairs = zip(self.full.devices, self.accounts, strict=True)
            devices = tuple(self._sample(one, accounts, turn, state) for one, accounts in pairs)
        return replace(self.full, devices=devices)

    def _sample(self, one: DeviceSnapshot, accounts: DeviceUsage, turn: int, state: State) -> DeviceSnapshot:
        charges = [
            Charge(
                turn * 1000 + each.pid,
                turn * 1000,
                ("pod", f"ml/{turn}-{each.pid}"),
                state,
                each.memory,
                state is State.IDLE,
            )
            for each in one.holdings
        ]
        reserved = Reservation("pod", f"ml/{turn}-0", "kubelet", held=True)
        return replace(
            one,
            owner_usage=accounts.update(charges, one.ledger, self.now, 1e9),
            reservation_status=ReservationStatus((reserved,), (), ("kubelet",)),
        )


@pytest.mark.parametrize("after", [1.0, 10.0, 200.0])
def test_a_full_host_under_churn_stays_below_1730_series(after: float) -> None:
    """8 GPUs, 64 holders whose owners are all replaced every two samples, at any pace: never 1,730 series."""
    churn = Churn()
    most: Counter[str] = Counter()
    for turn in range(30):
        names = Counter(each.split("{")[0] for each in series(churn.turn(turn, after)))
        most = max(most, names, key=Counter.total)
    assert most.total() < 1730, most.most_common(8)


def test_a_change_of_state_makes_one_series_of_the_holding() -> None:
    """A new state is one series of the holding, and the first time three of its owner; no more after that."""
    host = OneHolder()
    known = series(host.sample())
    known |= series(host.sample())
    host.program.work = 0.4
    known |= series(host.sample())
    made: list[set[str]] = []
    for _ in range(3):
        for work in (False, True):
            for _ in range(12):
                host.program.work = 0.4 if work else 0.0
                now = series(host.sample())
                if now - known:
                    made.append(now - known)
                    known |= now

    (idle,) = made
    families = Counter(each.split("{")[0] for each in idle)
    assert families == {
        "vramledger_process_state_since_timestamp_seconds": 1,
        "vramledger_owner_memory_bytes": 1,
        "vramledger_owner_memory_byte_seconds_total": 1,
        "vramledger_owner_memory_wasted_byte_seconds_total": 1,
    }
