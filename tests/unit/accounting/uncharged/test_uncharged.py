"""Bytes that NVML charges to nobody: who has them, within which bounds, and what is never guessed."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.host.model import CONTEXT, EPOCH, GIB, MIB, Fault, Gpu, Host, Process, Use
from tests.support.host.scrapes import SimulatedExporter
from tests.support.sure import sure
from vramledger.accounting.uncharged.solver import (
    NOTHING,
    Left,
    MemoryPool,
    PoolHolder,
    Range,
    collect_sources,
    foreign_bytes,
    narrow,
    share_out,
    solve,
    undivided_bytes,
)
from vramledger.accounting.uncharged.tracker import HolderEvidence, LeftEvidence, created, describe
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Grade, Holding, Ledger, Snapshot, State

TEN = dict.fromkeys(range(10, 20), (0, 0))
ACTIONS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 16)), max_size=40)
OWN = 9 * MIB
"""Uncharged bytes of each context, as measured."""


@dataclass(slots=True)
class Managed:
    """A program with managed memory, in figures that a test sets."""

    charged: int = 0  # bytes that NVML charges to it, besides its context
    resident: int = 0  # managed bytes on the card
    mapped: int | None = 0  # what it maps of /dev/nvidia-uvm
    pool: int = 0  # what its agent reports of CuPy's pool, if it has an agent

    def use(self, _: float) -> Use:
        pools = {"cupy": {"pool": self.pool, "in_use": self.pool}} if self.pool else {}
        return Use(CONTEXT + self.charged, 0.0, 1.0, pools, self.resident + OWN, self.mapped)


class Card:
    """Two GPUs of 80 GiB and the programs that a test starts there."""

    def __init__(self) -> None:
        self.now = 0.0
        self.nobody = [0, 0]
        gpus = [Gpu(each, 80 * GIB, GIB, partial(self._unowned, each)) for each in (0, 1)]
        self.host = Host(gpus, [], Random(1))  # noqa: S311 nothing here is left to chance
        self.exporter = SimulatedExporter(self.host, idle_after=600.0)
        self.hidden: tuple[HiddenHolder, ...] = ()

    def _unowned(self, gpu: int, _: float) -> int:
        return self.nobody[gpu]

    def start(
        self, pid: int, *programs: Managed, user: str = "ada", gpu: int = 0, agent: bool = False
    ) -> Managed:
        """Start a program on one GPU or, with two programs, on both."""
        places = dict(enumerate(programs)) if len(programs) > 1 else {gpu: programs[0]}
        process = Process(pid, places, begin=self.now, user=user, framework="cuda", agent=agent)
        self.host.processes = [*self.host.processes, process]
        return programs[0]

    def end(self, pid: int, *, leaving: int = 0) -> None:
        """Kill a program; bytes of it stay on the first GPU."""
        for process in self.host.processes:
            if process.pid == pid:
                process.end = self.now + 0.5
        self.nobody[0] += leaving

    def sample(self, seconds: int = 1) -> Snapshot:
        """Take a sample each second, and return the last."""
        for _ in range(seconds):
            self.now += 1
            snapshot = self.exporter.sample(self.now, hidden=self.hidden)
            for device in snapshot.devices:
                if device.up:
                    balanced(device)
        return snapshot

    def fail(self, gpu: int, since: int, until: int) -> None:
        """Let a GPU give no data in some samples, counted from the next one, which is 1."""
        span = self.now + since - 0.5, self.now + until + 0.5
        self.host.faults = [*self.host.faults, Fault("device lost", *span, gpu=gpu, name="timeout")]

    def device(self, seconds: int = 3, gpu: int = 0) -> DeviceSnapshot:
        """Return a GPU after some samples; two readings settle what one alone does not."""
        return self.sample(seconds).devices[gpu]


def balanced(device: DeviceSnapshot) -> None:
    """Check that the ledger balances, and that every byte is given once."""
    ledger = sure(device.ledger)
    parts = sum(ledger.states.values()) + ledger.unattributed
    assert ledger.total == ledger.free + (ledger.driver_reserved or 0) + parts
    assert ledger.unattributed >= 0
    given = sum(each.uncharged.least for each in device.holdings if each.uncharged is not None)
    group = device.undivided.bytes if device.undivided is not None else 0
    assert given + group + ledger.unattributed == ledger.uncharged


def holding(device: DeviceSnapshot, pid: int) -> Holding:
    (found,) = [each for each in device.holdings if each.pid == pid]
    return found


def given_to(device: DeviceSnapshot, pid: int) -> tuple[int, int]:
    """Return the least and the most uncharged bytes of a pid."""
    uncharged = holding(device, pid).uncharged
    return (0, 0) if uncharged is None else (uncharged.least, uncharged.most)


def about(size: int) -> object:
    """Return what compares equal to a size within 1 %."""
    return pytest.approx(size, rel=0.01)


def watched() -> Card:
    """Return a card that was sampled once, so that what comes later is seen to come."""
    card = Card()
    card.sample()
    return card


def with_creator() -> Card:
    """Return a card on which alice's program, pid 694, has made 4 GiB that it may share."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    return card


def after_creator(card: Card) -> DeviceSnapshot:
    """Return the device some time after that program was killed, and its 4 GiB have stayed."""
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    return card.device(6)


def test_managed_memory_is_its_programs() -> None:
    """8 GiB of managed memory of the only program belong to it, and the evidence says from what."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    device = card.device()
    uncharged = sure(holding(device, 7).uncharged)
    assert (uncharged.least, uncharged.managed) == (8 * GIB, 8 * GIB)
    assert "NVML charges 518 MiB; 8.0 GiB are managed memory, from its 8.0 GiB of" in uncharged.why
    ledger = sure(device.ledger)
    assert (ledger.unattributed, ledger.states[State.ACTIVE]) == (OWN, CONTEXT + 8 * GIB)


BOUNDS = {
    "larger than the device: its used bytes": (Card, {7: (78, 96)}, 0, {7: (78, 78)}, (None, 0)),
    "touched on the host only: not on the card": (Card, {7: (0, 8)}, 0, {7: (0, 0)}, (None, 0)),
    "as large as the bytes: exact": (watched, {7: (8, 8), 8: (2, 2)}, 0, {7: (8, 8), 8: (2, 2)}, (None, 0)),
    "beside ten that have none: exact": (watched, {7: (5, 8), **TEN}, 0, {7: (5, 5), **TEN}, (None, 0)),
    "either can have them: ranges": (watched, {7: (8, 8), 8: (0, 6)}, 0, {7: (2, 8), 8: (0, 6)}, (6, 0)),
    "seen late: perhaps a handle of 8": (Card, {7: (0, 8), 8: (0, 0)}, 4, {7: (0, 4), 8: (0, 4)}, (4, 0)),
    "more than all mappings: nobody's": (watched, {7: (0, 8)}, 12, {7: (0, 8)}, (None, 12)),
    "not readable: 8 may have them too": (Card, {7: (8, 8), 8: (0, None)}, 0, {7: (0, 8), 8: (0, 8)}, (8, 0)),
    "not readable, alone: it proves nothing": (Card, {8: (0, None)}, 8, {8: (0, 0)}, (None, 8)),
}
"""When the sampling begins; resident and mapped of each; bytes without a holder; who gets what."""


@pytest.mark.parametrize(("begin", "programs", "without", "shares", "rest"), BOUNDS.values(), ids=BOUNDS)
def test_bytes_and_mappings(
    begin: Callable[[], Card],
    programs: dict[int, tuple[int, int | None]],
    without: int,
    shares: dict[int, tuple[int, int]],
    rest: tuple[int | None, int],
) -> None:
    """What is on the card, and what each has mapped (GiB), bound what each has; the rest has no owner."""
    card, (undivided, nobodys) = begin(), rest
    for pid, (resident, mapped) in programs.items():
        known = None if mapped is None else mapped * GIB
        card.start(pid, Managed(resident=resident * GIB, mapped=known), user=f"u{pid}")
    card.nobody[0] += without * GIB
    device = card.device()
    for pid, (least, most) in shares.items():
        assert given_to(device, pid) == (about(least * GIB), about(most * GIB)), pid
    assert (device.undivided and device.undivided.bytes) == (undivided and about(undivided * GIB))
    if device.undivided is not None:
        assert (device.undivided.pids, device.undivided.owner) == (tuple(programs), None)
    assert sure(device.ledger).unattributed // GIB == nobodys


def test_after_a_restart_a_mapping_as_large_as_the_bytes_is_exact() -> None:
    """Seen late, the bytes are a program's whose mappings are exactly as large, although others are there."""
    card = Card()
    for pid in range(10, 20):
        card.start(pid, Managed(charged=GIB))
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    uncharged = sure(holding(card.device(1), 7).uncharged)
    assert (uncharged.least, uncharged.grade) == (about(8 * GIB), Grade.INFERRED)


def test_bytes_that_came_alone_stay_whose_they_were() -> None:
    """A program that comes later with a mapping and no bytes changes nothing while nothing moves."""
    card = watched()
    card.start(7, Managed(resident=8 * GIB, mapped=10 * GIB))
    card.sample(4)
    card.start(8, Managed(resident=0, mapped=64 * GIB), user="mallory")
    device = card.device(5)
    assert given_to(device, 7)[0] == about(8 * GIB)
    assert given_to(device, 8)[1] <= GIB


def test_bytes_that_creep_are_not_a_neighbours() -> None:
    """Bytes that come slowly, a few MiB a second, are of either of two programs, and not of the newer one."""
    card = watched()
    first = card.start(7, Managed(resident=8 * GIB, mapped=16 * GIB))
    card.sample(4)
    card.start(8, Managed(resident=0, mapped=16 * GIB))
    for _ in range(100):
        first.resident += 20 * MIB
        card.sample()
    device = card.device(1)
    assert given_to(device, 8)[0] == 0
    assert given_to(device, 7)[1] >= first.resident - GIB


def test_short_memory_settles_nothing() -> None:
    """While a device is full, pages of one program make room for another's: what was settled is a range."""
    card = watched()
    card.start(7, Managed(resident=70 * GIB, mapped=70 * GIB))
    card.sample(4)
    card.start(8, Managed(charged=8 * GIB, mapped=64 * GIB))
    device = card.device(4)
    assert given_to(device, 7)[0] < 10 * GIB
    assert given_to(device, 8) == (0, about(64 * GIB))


def test_the_end_of_one_settles_the_other() -> None:
    """Bytes that stay when one of two programs ends are the other's."""
    card = watched()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    card.start(8, Managed(mapped=8 * GIB))
    card.sample(4)
    card.end(8)
    assert given_to(card.device(4), 7)[0] == about(8 * GIB)


def test_a_program_on_two_devices_has_no_more_than_it_maps() -> None:
    """Bytes on two devices that are more than a program maps are not all its own: neither part is given."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB, resident=8 * GIB), Managed(mapped=0))
    card.nobody[1] = 4 * GIB
    least = [given_to(device, 7)[0] for device in card.sample(3).devices]
    assert sum(least) <= 8 * GIB
    assert least[1] == 0


def test_a_program_on_two_devices_within_its_mapping() -> None:
    """Bytes on two devices that its mappings allow together are exact on each of them."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB, resident=3 * GIB), Managed(resident=2 * GIB))
    assert [given_to(device, 7)[0] for device in card.sample(3).devices] == [3 * GIB, 2 * GIB]


def test_one_reading_alone_moves_nothing() -> None:
    """Bytes that are without a holder in one reading alone go to no program."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB))
    card.sample(3)
    card.nobody[0] = 4 * GIB
    assert given_to(card.device(1), 7) == (0, 0)
    card.nobody[0] = 0
    assert given_to(card.device(1), 7) == (0, 0)


def test_the_mildest_state_counts_the_undivided() -> None:
    """Bytes of a stopped or of an active program count as active: to know less is never harsher."""
    card = with_creator()
    card.start(702, Managed())
    card.start(703, Managed())
    card.host.processes[1].fates["stopped"] = 0.0
    device = after_creator(card)
    undivided = sure(device.undivided)
    assert (undivided.state, undivided.wasted) == (State.ACTIVE, False)
    assert sure(device.wasted) < GIB


@pytest.mark.parametrize("hidden", ["reserve", "holders"])
def test_where_the_drivers_part_or_others_are_not_known_nothing_is_given(hidden: str) -> None:
    """Where the driver counts its reserve as used, or outside the host's PID namespace, nobody gets bytes."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    if hidden == "reserve":
        memory = sure(card.host.reading(0.5).devices[0].memory)
        card.host.gpus[0].says["memory"] = memory._replace(reserved=None)
    snapshot = card.exporter.sample(1.0, host_pid_namespace=hidden == "reserve")
    assert [holding(each, 7).uncharged for each in snapshot.devices[:1]] == [None]


def test_the_clock_may_be_set() -> None:
    """A clock that was set moves the time of an end along."""
    card = with_creator()
    card.start(702, Managed())
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    before = card.device(6).left[0].ended
    ahead = card.exporter.sample(card.now + 1, boot_time=600 + 3600, time=EPOCH + 3600 + card.now + 1)
    assert ahead.devices[0].left[0].ended == before + 3600


@settings(max_examples=examples(50), deadline=None)
@given(ACTIONS)
def test_no_byte_goes_to_a_wrong_holder(actions: list[tuple[int, int, int]]) -> None:
    """Programs that start, move pages, grow, share and die, one at a time: no holder gets another's bytes."""
    card = watched()
    programs: dict[int, Managed] = {}
    heirs: dict[int, int] = {}
    pid = 10
    for action, which, size in actions:
        alive = sorted(programs)
        chosen = alive[which % len(alive)] if alive else None
        if action <= 1 and len(programs) < 5:
            pid += 1
            resident = 0 if action else size * GIB // 2
            programs[pid] = card.start(pid, Managed(size * GIB // 4, resident, size * GIB))
            if card.device(1).ledger.free < 4 * GIB:  # type: ignore[union-attr]
                return
        elif action in (2, 3) and chosen is not None:
            program = programs[chosen]
            program.resident = min(program.mapped or 0, size * GIB)
        elif action == 4 and chosen is not None and len(alive) > 1:
            heir = next(each for each in alive if each != chosen)
            left = programs[chosen].charged
            card.end(chosen, leaving=left)
            heirs[heir] = heirs.get(heir, 0) + left
            card.nobody[0] -= heirs.pop(chosen, 0)
            del programs[chosen]
        elif action in (6, 7) and chosen is not None:
            program = programs[chosen]
            program.resident += size * GIB
            card.sample(1 + which)  # its mapping is read some seconds later
            program.mapped = (program.mapped or 0) + size * GIB
        elif action == 5 and chosen is not None:
            card.end(chosen)
            card.nobody[0] -= heirs.pop(chosen, 0)
            del programs[chosen]
        device = card.device(5)
        if device.ledger is not None and device.ledger.free < 4 * GIB:
            return  # a device that is full settles nothing, and the simulated one would overflow
        for each, program in programs.items():
            least, most = given_to(device, each)
            have = program.resident + heirs.get(each, 0)
            slack = 64 * MIB + have // 50
            assert least <= have + slack, (each, least / GIB, have / GIB)
            assert most >= have - slack or (most == 0 and have < 64 * MIB), (each, most / GIB, have / GIB)


def test_a_few_mib_less_do_not_unsettle() -> None:
    """What was certain stays so when a reading has a few MiB less, as when another context comes."""
    card = watched()
    first = card.start(7, Managed(resident=6 * GIB, mapped=8 * GIB))
    card.sample(4)
    first.resident -= 3 * MIB
    card.start(8, Managed(mapped=12 * GIB))
    device = card.device(5)
    assert given_to(device, 7)[0] == about(6 * GIB)
    assert given_to(device, 8)[1] < GIB


def test_an_agent_proves_its_managed_pool() -> None:
    """An agent whose pool is larger than what NVML charges, and as large as the mappings, proves them."""
    card = watched()
    card.start(7, Managed(charged=MIB, resident=8 * GIB, mapped=8 * GIB, pool=8 * GIB), agent=True)
    snapshot = card.sample(4)
    uncharged = sure(holding(snapshot.devices[0], 7).uncharged)
    assert (uncharged.least, uncharged.grade) == (about(8 * GIB), Grade.PROVEN)
    assert "its agent's report of 8.0 GiB" in uncharged.why
    assert snapshot.agents[7].pool(snapshot.devices[0].reading.uuid) == 8 * GIB


@pytest.mark.parametrize("late", [1, 3, 11])
@pytest.mark.parametrize("before", [0, 8 * MIB, 126 * MIB])
@pytest.mark.parametrize("pool", [0, 2310 * MIB])
def test_mappings_that_are_read_late_are_believed(before: int, pool: int, late: int) -> None:
    """Bytes that came before their mapping was read belong to its program once it is (JAX that grows)."""
    card = watched()
    jax = card.start(7, Managed(100 * MIB, resident=before, mapped=before and 128 * MIB), agent=pool > 0)
    card.sample(5)
    jax.resident, jax.pool = 2176 * MIB, pool
    card.sample(late)
    jax.mapped = 2310 * MIB
    assert given_to(card.device(), 7) == (about(2176 * MIB), about(2176 * MIB))


@pytest.mark.parametrize("late", [1, 3, 11, 25])
def test_a_neighbour_does_not_keep_what_a_late_mapping_explains(late: int) -> None:
    """A neighbour seems to have the bytes until the mapping of the one that took them is read, not longer."""
    card = watched()
    card.start(7, Managed(resident=2 * GIB, mapped=8 * GIB), user="ada")
    card.sample(5)
    jax = card.start(8, Managed(resident=126 * MIB, mapped=128 * MIB), user="bob")
    card.sample(5)
    jax.resident = 3 * GIB
    card.sample(late)
    jax.mapped = 4 * GIB
    device = card.device()
    for pid, truth in ((7, 2 * GIB), (8, 3 * GIB)):
        least, most = given_to(device, pid)
        assert least <= 1.01 * truth, pid
        assert most >= 0.99 * truth, pid


def test_a_handle_of_a_killed_creator() -> None:
    """What a killed program had shared is the other's, and the evidence says who made it, and when."""
    card = with_creator()
    card.start(702, Managed(), user="bob")
    device = after_creator(card)
    assert given_to(device, 702)[0] == about(4 * GIB)
    uncharged = sure(holding(device, 702).uncharged)
    assert uncharged.managed == 0
    assert "created by pid 694 of alice, which ended at 02:00 UTC; pid 702 still has them" in uncharged.why
    assert [each.pid for each in device.left] == [694]


def test_two_importers_of_one_owner() -> None:
    """With two importers of one owner the bytes are the owner's, although not one holding's."""
    card = with_creator()
    card.start(702, Managed(), user="bob")
    card.start(703, Managed(), user="bob")
    device = after_creator(card)
    assert sure(device.undivided).owner == ("user", "bob")
    alice, bob = sorted(sure(device.owner_usage).owners, key=lambda each: each.name)
    assert (alice.name, bob.name) == ("alice", "bob")
    assert sum(bob.held.values()) == about(2 * CONTEXT + 4 * GIB)
    assert (alice.not_freed, alice.freed) == (0, about(CONTEXT))


def test_memory_that_is_freed_late_is_nobodys_legacy() -> None:
    """Bytes that are freed a second after their program has ended are given to nobody in between."""
    card = with_creator()
    card.start(7, Managed(mapped=8 * GIB))
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    between = card.device(1)
    card.nobody[0] = 0
    after = card.device(4)
    assert given_to(between, 7)[0] == given_to(after, 7)[0] == 0
    assert after.left == ()


def test_a_creator_without_any_heir_leaves_unattributed_bytes() -> None:
    """Where nobody is left, the bytes are unattributed, and it is known who had made them."""
    device = after_creator(with_creator())
    assert sure(device.ledger).unattributed == 4 * GIB
    assert [(each.pid, each.user, each.pids) for each in device.left] == [(694, "alice", ())]


def test_a_forked_child_of_a_killed_program_may_have_its_memory() -> None:
    """A hidden child with the device open may have what its parent left: no other holder gets it alone."""
    card = with_creator()
    card.start(702, Managed())
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    card.hidden = (HiddenHolder(800, 5000, "inherited", "worker.py", "alice", (0,)),)
    device = card.device(6)
    assert given_to(device, 702) == (0, about(4 * GIB))
    assert sure(device.undivided).pids == (702,)


def test_a_rank_on_another_gpu_may_have_the_memory_of_a_killed_one() -> None:
    """A rank that has mapped the memory of another GPU keeps it: no holder there gets it alone."""
    card = with_creator()
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(702, Managed(), user="bob")
    device = after_creator(card)
    assert given_to(device, 702) == (0, about(4 * GIB))
    undivided = sure(device.undivided)
    assert (undivided.pids, undivided.owner) == ((695, 702), None)
    assert "pid 702 or pid 695 on another GPU still has them" in sure(holding(device, 702).uncharged).why


@pytest.mark.parametrize(("since", "until"), [(1, 1), (1, 2), (2, 2), (3, 5), (-1, 4), (-1, 99)])
def test_a_failed_sample_of_another_gpu_gives_nobody_its_bytes(since: int, until: int) -> None:
    """Who held memory on a GPU that does not answer now may still have what an ended program left."""
    card = with_creator()
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(702, Managed(), user="bob")
    card.fail(1, since + 3, until + 3)
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    device = card.device(16)
    assert given_to(device, 702) == (0, about(4 * GIB))
    assert sure(device.undivided).pids == (695, 702)


def test_a_rank_that_ends_while_another_gpu_fails() -> None:
    """A GPU without data keeps the holders of that GPU possible, and no others."""
    card = with_creator()
    card.host.gpus = [*card.host.gpus, Gpu(2, 80 * GIB, GIB, lambda _: 0)]
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(696, Managed(charged=4 * GIB), user="alice", gpu=2)
    card.start(702, Managed(), user="bob")
    card.sample(3)
    card.fail(2, 1, 10)
    card.end(694, leaving=4 * GIB)
    assert sure(card.device(6).undivided).pids == (695, 696, 702)
    card.end(695)
    assert sure(card.device(2).undivided).pids == (696, 702)
    card.end(696)
    assert given_to(card.device(2), 702) == (0, about(4 * GIB)), "its GPU has not answered yet"
    assert given_to(card.device(6), 702) == (about(4 * GIB), about(4 * GIB))


@pytest.mark.parametrize("lists", [False, True])
def test_a_gpu_whose_holders_were_never_known_settles_nothing(lists: bool) -> None:
    """Where another GPU has never said who holds it, somebody there may have the bytes too."""
    card = with_creator()
    card.fail(1, 0, 5)
    card.start(702, Managed(), user="bob")
    card.sample(6 if lists else 3)
    card.end(694, leaving=4 * GIB)
    device = card.device(12)
    assert given_to(device, 702) == (about(4 * GIB) if lists else 0, about(4 * GIB))
    uncharged = sure(holding(device, 702).uncharged)
    assert ("a process that NVML does not list here can have them too" in uncharged.why) is not lists


def test_memory_that_only_a_rank_on_another_gpu_can_have() -> None:
    """Memory that nobody on its GPU can have is named after the only process that can, while that lives."""
    card = with_creator()
    card.start(695, Managed(), user="alice", gpu=1)
    assert [(left.pid, left.user, left.pids) for left in after_creator(card).left] == [(694, "alice", (695,))]
    card.start(702, Managed(), user="bob")
    assert given_to(card.device(6), 702) == (0, 0), "it came later"
    card.end(695, leaving=-4 * GIB)
    assert card.device(6).left == ()


def test_a_creator_that_shared_in_its_last_second() -> None:
    """A creator that took 4 GiB after the last sample, shared them and was killed, made all of them."""
    card = Card()
    card.start(694, Managed())
    card.start(702, Managed())
    card.start(7, Managed(mapped=8 * GIB))
    assert given_to(after_creator(card), 7)[0] == 0


def test_one_that_had_managed_memory_and_shared_some_other() -> None:
    """A killed program takes its managed memory along; what it had shared stays, also if that is as much."""
    card = watched()
    card.start(694, Managed(charged=4 * GIB, resident=4 * GIB, mapped=4 * GIB))
    card.start(702, Managed())
    card.sample(4)
    card.end(694, leaving=4 * GIB)
    assert given_to(card.device(6), 702)[0] == about(4 * GIB)


def test_the_last_importer_takes_the_bytes_along() -> None:
    """When the importer ends and the bytes go, a neighbour with managed memory keeps exactly its own."""
    card = with_creator()
    card.start(702, Managed())
    card.sample(2)
    card.start(7, Managed(resident=8 * GIB, mapped=9 * GIB))
    card.sample(4)
    card.end(694, leaving=4 * GIB)
    card.sample(6)
    card.nobody[0] = 0
    card.end(702)
    assert given_to(card.device(6), 7) == (about(8 * GIB), about(8 * GIB))


@pytest.mark.parametrize(("looked", "least"), [(None, 0), (2.0, 4 * GIB)])
def test_the_time_until_a_look_was_watched(looked: float | None, least: int) -> None:
    """In three seconds a stranger can have come, left bytes and gone; in the one since a look none can."""
    card = Card()
    card.start(7, Managed(charged=GIB))
    program = card.start(702, Managed(mapped=8 * GIB))
    card.sample(3)
    program.resident += 4 * GIB
    unchanged = None if looked is None else card.host.reading(card.now).monotonic + looked
    card.now += 3.0
    card.exporter.sample(card.now, unchanged=unchanged)
    assert given_to(card.device(6), 702) == (about(least), about(4 * GIB))


EXACT = Range(8 * GIB, 8 * GIB)
ALONE = HolderEvidence(EXACT, 518 * MIB, EXACT, 8 * GIB, None, (), (), False, False)
LEFT = LeftEvidence(Range(4 * GIB, 4 * GIB), created(694, "alice", 7200.0), (702,), None)
CHARGED = "NVML charges 518 MiB; "
MAPPINGS = "from its 8.0 GiB of /dev/nvidia-uvm mappings"


@pytest.mark.parametrize(
    ("known", "grade", "why"),
    [
        (ALONE, Grade.SEEN, f"8.0 GiB are managed memory, {MAPPINGS}; nobody else here can have them"),
        (ALONE._replace(reported=8 * GIB, matched=True), Grade.PROVEN,
         (f"8.0 GiB are managed memory, {MAPPINGS} and its agent's report of 8.0 GiB; "
         "the mappings here are as large as what NVML charges to nobody")),
        (ALONE._replace(share=Range(0, 8 * GIB), managed=Range(0, 8 * GIB), bound=None, rivals=range(10,
         17)), Grade.INFERRED,
         ("up to 8.0 GiB can be managed memory, from its mappings, which we may not read; "
         "pid 10, 11, 12, 13, 14 and 2 more can have them too")),
        (ALONE._replace(share=Range(2 * GIB, 8 * GIB), managed=Range(2 * GIB, 8 * GIB)), Grade.INFERRED,
         (f"2.0 GiB to 8.0 GiB can be managed memory, {MAPPINGS}; "
         "a process that NVML does not list here can have them too")),
        (ALONE._replace(share=LEFT.range, managed=NOTHING, left=(LEFT,)), Grade.INFERRED,
         "4.0 GiB created by pid 694 of alice, which ended at 02:00 UTC; pid 702 still has them"),
        (ALONE._replace(share=Range(0, 4 * GIB), managed=NOTHING, left=(LEFT._replace(created=created(694,
         None, 7200.0), heirs=(702, 703), hidden=9),), rivals=(703,)), Grade.INFERRED,
         ("4.0 GiB created by pid 694 of an unknown user, which ended at 02:00 UTC; "
         "pid 702, 703 or hidden pid 9 still have them; pid 703 can have them too")),
        (ALONE._replace(late=True), Grade.INFERRED,
         f"8.0 GiB are managed memory, {MAPPINGS}; nobody else here can have them"),
    ],
    ids=["alone", "reported", "unreadable", "unseen", "left", "hidden", "late"],
)  # fmt: skip
def test_the_evidence_is_said(known: HolderEvidence, grade: Grade, why: str) -> None:
    """The sentence has every fact on which the share rests, and the grade is that of the weakest."""
    found = describe(known)
    assert (found.grade, found.why) == (grade, CHARGED + why)


def test_only_certain_bytes_give_way() -> None:
    """Managed memory is all of an exact share that can be, and of a range only what certainly is."""
    assert describe(ALONE._replace(share=Range(12 * GIB, 12 * GIB), left=(LEFT,))).managed == 8 * GIB
    either = ALONE._replace(share=Range(4 * GIB, 8 * GIB), managed=Range(2 * GIB, 8 * GIB))
    assert describe(either).managed == 2 * GIB


_BYTES = st.integers(0, 16).map(lambda count: count * GIB)
_RANGES = st.tuples(_BYTES, _BYTES).map(lambda pair: Range(min(pair), max(pair)))


def _holder(pid: int, bound: int | None) -> PoolHolder:
    holding = Holding(pid, 100, GIB, GIB, "C", State.ACTIVE, 0.0, "")
    return PoolHolder("GPU-0", holding, ("user", f"u{pid}"), bound)


@given(st.lists(st.none() | _BYTES, max_size=4), st.lists(_RANGES, max_size=3), _BYTES, _BYTES, st.booleans())
def test_to_divide_changes_nothing(
    bounds: list[int | None], ranges: list[Range], count: int, unwatched: int, elsewhere: bool
) -> None:
    """Every share is within the bytes, and asking changes neither what was remembered nor the answer."""
    holders = tuple(_holder(pid, bound) for pid, bound in enumerate(bounds, 1))
    there = frozenset(each.identity for each in holders[:2])
    other = frozenset({(99, 1)}) if elsewhere else frozenset()
    lefts = [Left((50, "ada"), 0.0, float(at), there, other, each) for at, each in enumerate(ranges)]
    ledger = Ledger(80 * GIB, 40 * GIB, GIB, dict.fromkeys(State, 0), count, 0)
    pool = MemoryPool("GPU-0", ledger, holders, ())
    before = copy.deepcopy(lefts)
    answers = []
    for _ in range(2):
        sources = collect_sources(pool, count, lefts, 3.0, unwatched=unwatched, late=0, settled={})
        solution = solve(sources, foreign_bytes([sources]))
        shares = share_out(sources, solution)
        answers.append((shares, undivided_bytes(sources, shares, solution.ranges)))
        assert all(0 <= share.least <= share.most <= count for share in shares.values())
    assert answers[0] == answers[1]
    assert [each.range for each in lefts] == [each.range for each in before]


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1, max_size=6), st.data())
def test_a_range_never_excludes_the_truth(bounds: list[tuple[int, int]], data: st.DataObject) -> None:
    """Whatever each source really has within its range, its narrowed range contains that."""
    ranges = {str(number): Range(min(pair), max(pair)) for number, pair in enumerate(bounds)}
    truth = {name: data.draw(st.integers(each.least, each.most)) for name, each in ranges.items()}
    found = narrow(sum(truth.values()), ranges)
    for name, have in truth.items():
        assert found[name].least <= have <= found[name].most


def test_sources_that_certainly_have_too_much_are_certain_no_more() -> None:
    """Where sources certainly have more than there is, only what others cannot have stays certain."""
    found = narrow(100 * 2**20, {"one": Range(80 * 2**20, 90 * 2**20), "other": Range(70 * 2**20, 2**30)})
    assert (found["one"].least, found["other"].least) == (0, 10 * 2**20)
    assert narrow(0, {"one": Range(2**30, 2**30)}) == {"one": Range(0, 0)}
