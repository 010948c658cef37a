"""Bytes that NVML charges to nobody: who has them, within which bounds, and what is never guessed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.host.model import CONTEXT, EPOCH, GIB, MIB, Fault, Gpu, Host, Process, Use
from tests.support.host.scrapes import SimulatedExporter
from vramledger.model.reading import HiddenHolder
from vramledger.model.snapshot import DeviceSnapshot, Grade, Holding, Snapshot, State

OWN = 9 * MIB
"""Uncharged bytes of each context, as measured."""


@dataclass(slots=True)
class Managed:
    """A program with managed memory, in figures that a test sets.

    Attributes:
        charged: bytes that NVML charges to it, besides its context.
        resident: managed bytes on the card.
        mapped: what it maps of /dev/nvidia-uvm.
        pool: what its agent reports of CuPy's pool, if it has an agent.
    """

    charged: int = 0
    resident: int = 0
    mapped: int | None = 0
    pool: int = 0

    def use(self, _: float) -> Use:
        """Return the figures as they are now."""
        pools = {"cupy": {"pool": self.pool, "in_use": self.pool}} if self.pool else {}
        return Use(CONTEXT + self.charged, 0.0, 1.0, pools, self.resident + OWN, self.mapped)


class Card:
    """Two GPUs of 80 GiB and the programs that a test starts there."""

    def __init__(self) -> None:
        """Start empty, before the first sample."""
        self.now = 0.0
        self.nobody = [0, 0]
        self.host = Host(
            [
                Gpu(0, 80 * GIB, GIB, lambda _: self.nobody[0]),
                Gpu(1, 80 * GIB, GIB, lambda _: self.nobody[1]),
            ],
            [],
            Random(1),  # noqa: S311 nothing here is left to chance
        )
        self.exporter = SimulatedExporter(self.host, idle_after=600.0)
        self.hidden: tuple[HiddenHolder, ...] = ()

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
        fault = Fault("device lost", *span, gpu=gpu, name="timeout")
        self.host.faults = [*self.host.faults, fault]

    def device(self, seconds: int = 3, gpu: int = 0) -> DeviceSnapshot:
        """Return a GPU after some samples; two readings settle what one alone does not."""
        return self.sample(seconds).devices[gpu]


def balanced(device: DeviceSnapshot) -> None:
    """Check that the ledger balances, and that every byte is given once."""
    ledger = device.ledger
    assert ledger is not None
    parts = sum(ledger.states.values()) + ledger.unattributed
    assert ledger.total == ledger.free + (ledger.driver_reserved or 0) + parts
    assert ledger.unattributed >= 0
    given = sum(each.uncharged.least for each in device.holdings if each.uncharged is not None)
    group = device.undivided.bytes if device.undivided is not None else 0
    assert given + group + ledger.unattributed == ledger.uncharged


def holding(device: DeviceSnapshot, pid: int) -> Holding:
    """Return the holding of a pid."""
    (found,) = [each for each in device.holdings if each.pid == pid]
    return found


def given_to(device: DeviceSnapshot, pid: int) -> tuple[int, int]:
    """Return the least and the most uncharged bytes of a pid."""
    uncharged = holding(device, pid).uncharged
    return (0, 0) if uncharged is None else (uncharged.least, uncharged.most)


def about(size: int) -> object:
    """Return what compares equal to a size within 1 %."""
    return pytest.approx(size, rel=0.01)


def test_managed_memory_is_its_programs() -> None:
    """8 GiB of managed memory of the only program belong to it, and the evidence says from what."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))

    device = card.device()

    uncharged = holding(device, 7).uncharged
    assert uncharged is not None
    assert (uncharged.least, uncharged.managed) == (8 * GIB, 8 * GIB)
    assert "NVML charges 518 MiB; 8.0 GiB are managed memory, from its 8.0 GiB of" in uncharged.why
    assert device.ledger is not None
    assert device.ledger.unattributed == OWN
    assert device.ledger.states[State.ACTIVE] == CONTEXT + 8 * GIB


def test_a_program_that_oversubscribes_has_what_is_on_the_card() -> None:
    """A mapping larger than the device gives the program the used bytes, and not its whole mapping."""
    card = Card()
    card.start(7, Managed(resident=78 * GIB, mapped=96 * GIB))

    assert given_to(card.device(), 7) == (78 * GIB, 78 * GIB)


def test_managed_memory_on_the_host_gives_nothing() -> None:
    """A mapping alone proves nothing: what was touched on the host only is not on the card."""
    card = Card()
    card.start(7, Managed(resident=0, mapped=8 * GIB))

    device = card.device()

    assert holding(device, 7).uncharged is None
    assert device.undivided is None


def test_among_ten_ordinary_holders() -> None:
    """Beside ten programs without managed memory the bytes that came while we watched are exact."""
    card = Card()
    for pid in range(10, 20):
        card.start(pid, Managed(charged=GIB), user=f"u{pid}")
    card.sample(3)
    card.start(7, Managed(resident=5 * GIB, mapped=8 * GIB))

    device = card.device()

    assert given_to(device, 7) == (about(5 * GIB), about(5 * GIB))
    assert all(given_to(device, pid) == (0, 0) for pid in range(10, 20))
    assert device.ledger is not None
    assert device.ledger.unattributed < device.ledger.used // 100


def test_after_a_restart_a_mapping_as_large_as_the_bytes_is_exact() -> None:
    """Seen late, the bytes are a program's whose mappings are exactly as large, although others are there."""
    card = Card()
    for pid in range(10, 20):
        card.start(pid, Managed(charged=GIB))
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))

    uncharged = holding(card.device(1), 7).uncharged

    assert uncharged is not None
    assert uncharged.least == about(8 * GIB)
    assert uncharged.grade is Grade.INFERRED


def test_after_a_restart_a_larger_mapping_is_a_range() -> None:
    """Seen late, 4 GiB beside a mapping of 8 may be a handle of the other program: nobody gets them alone."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB), user="ada")
    card.start(8, Managed(), user="bob")
    card.nobody[0] = 4 * GIB

    device = card.device()

    assert given_to(device, 7) == (0, about(4 * GIB))
    assert given_to(device, 8) == (0, about(4 * GIB))
    assert device.undivided is not None
    assert (device.undivided.bytes, device.undivided.pids) == (about(4 * GIB), (7, 8))
    assert device.undivided.owner is None


def test_two_programs_with_full_mappings_are_exact() -> None:
    """Two programs whose mappings are together as large as the bytes have one mapping each."""
    card = Card()
    card.sample()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    card.start(8, Managed(resident=2 * GIB, mapped=2 * GIB))

    device = card.device()

    assert (given_to(device, 7)[0], given_to(device, 8)[0]) == (about(8 * GIB), about(2 * GIB))


def test_two_programs_with_room_share_a_range() -> None:
    """Where either can have the bytes, each gets the range, and the ledger says that one of them has them."""
    card = Card()
    card.sample()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    card.start(8, Managed(resident=0, mapped=6 * GIB))

    device = card.device()

    assert given_to(device, 7) == (about(2 * GIB), about(8 * GIB))
    assert given_to(device, 8) == (0, about(6 * GIB))
    assert device.undivided is not None
    assert device.undivided.bytes == about(6 * GIB)
    assert device.ledger is not None
    assert device.ledger.unattributed < device.ledger.used // 100


def test_bytes_that_came_alone_stay_whose_they_were() -> None:
    """A program that comes later with a mapping and no bytes changes nothing while nothing moves."""
    card = Card()
    card.sample()
    card.start(7, Managed(resident=8 * GIB, mapped=10 * GIB))
    card.sample(4)
    card.start(8, Managed(resident=0, mapped=64 * GIB), user="mallory")

    device = card.device(5)

    assert given_to(device, 7)[0] == about(8 * GIB)
    assert given_to(device, 8)[1] <= GIB


def test_bytes_that_creep_are_not_a_neighbours() -> None:
    """Bytes that come slowly, a few MiB a second, are of either of two programs, and not of the newer one."""
    card = Card()
    card.sample()
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
    card = Card()
    card.sample()
    card.start(7, Managed(resident=70 * GIB, mapped=70 * GIB))
    card.sample(4)
    card.start(8, Managed(charged=8 * GIB, mapped=64 * GIB))

    device = card.device(4)

    assert given_to(device, 7)[0] < 10 * GIB
    assert given_to(device, 8) == (0, about(64 * GIB))


def test_the_end_of_one_settles_the_other() -> None:
    """Bytes that stay when one of two programs ends are the other's."""
    card = Card()
    card.sample()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    card.start(8, Managed(mapped=8 * GIB))
    card.sample(4)
    card.end(8)

    assert given_to(card.device(4), 7)[0] == about(8 * GIB)


def test_a_handle_of_a_killed_creator() -> None:
    """What a killed program had shared is the other's, and the evidence says who made it, and when."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 702)[0] == about(4 * GIB)
    uncharged = holding(device, 702).uncharged
    assert uncharged is not None
    assert uncharged.managed == 0
    assert "created by pid 694 of alice, which ended at 02:00 UTC; pid 702 still has them" in uncharged.why
    assert [each.pid for each in device.left] == [694]


def test_a_killed_creator_and_two_importers_of_different_users() -> None:
    """With two possible importers neither gets the bytes; the ledger names both."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.start(703, Managed(), user="eve")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 702) == given_to(device, 703) == (0, about(4 * GIB))
    assert device.undivided is not None
    assert (device.undivided.pids, device.undivided.owner) == ((702, 703), None)
    assert device.owner_usage is not None
    assert all(sum(each.held.values()) < GIB for each in device.owner_usage.owners)


def test_two_importers_of_one_owner() -> None:
    """With two importers of one owner the bytes are the owner's, although not one holding's."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.start(703, Managed(), user="bob")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert device.undivided is not None
    assert device.undivided.owner == ("user", "bob")
    assert device.owner_usage is not None
    (bob,) = [each for each in device.owner_usage.owners if each.name == "bob"]
    assert sum(bob.held.values()) == about(2 * CONTEXT + 4 * GIB)
    (alice,) = [each for each in device.owner_usage.owners if each.name == "alice"]
    assert alice.not_freed == 0
    assert alice.freed == about(CONTEXT)


def test_a_handle_is_not_managed_memory_of_a_neighbour() -> None:
    """Bytes left behind are not given to a neighbour whose large mapping lies on the host."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.start(7, Managed(mapped=8 * GIB), user="ada")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 7)[0] == 0
    assert given_to(device, 702)[0] == 0
    assert device.undivided is not None
    assert device.undivided.pids == (7, 702)


def test_memory_that_is_freed_late_is_nobodys_legacy() -> None:
    """Bytes that are freed a second after their program has ended are given to nobody in between."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB))
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
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert device.ledger is not None
    assert device.ledger.unattributed == 4 * GIB
    assert [(each.pid, each.user, each.pids) for each in device.left] == [(694, "alice", ())]


def test_a_forked_child_of_a_killed_program_may_have_its_memory() -> None:
    """A hidden child with the device open may have what its parent left: no other holder gets it alone."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB))
    card.start(702, Managed())
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    card.hidden = (HiddenHolder(800, 5000, "inherited", "worker.py", "alice", (0,)),)

    device = card.device(6)

    assert given_to(device, 702) == (0, about(4 * GIB))
    assert device.undivided is not None
    assert device.undivided.pids == (702,)


def test_a_rank_on_another_gpu_may_have_the_memory_of_a_killed_one() -> None:
    """A rank that has mapped the memory of another GPU keeps it: no holder there gets it alone."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(702, Managed(), user="bob")
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 702) == (0, about(4 * GIB))
    assert device.undivided is not None
    assert (device.undivided.pids, device.undivided.owner) == ((695, 702), None)
    uncharged = holding(device, 702).uncharged
    assert uncharged is not None
    assert "pid 702 or pid 695 on another GPU still has them" in uncharged.why


@pytest.mark.parametrize(("since", "until"), [(1, 1), (1, 2), (2, 2), (3, 5), (-1, 4), (-1, 99)])
def test_a_failed_sample_of_another_gpu_gives_nobody_its_bytes(since: int, until: int) -> None:
    """Who held memory on a GPU that does not answer now may still have what an ended program left."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(702, Managed(), user="bob")
    card.fail(1, since + 3, until + 3)
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(16)

    assert given_to(device, 702) == (0, about(4 * GIB))
    assert device.undivided is not None
    assert device.undivided.pids == (695, 702)


def test_a_rank_that_ends_while_another_gpu_fails() -> None:
    """A GPU without data keeps the holders of that GPU possible, and no others."""
    card = Card()
    card.host.gpus = [*card.host.gpus, Gpu(2, 80 * GIB, GIB, lambda _: 0)]
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(695, Managed(charged=4 * GIB), user="alice", gpu=1)
    card.start(696, Managed(charged=4 * GIB), user="alice", gpu=2)
    card.start(702, Managed(), user="bob")
    card.sample(3)
    card.fail(2, 1, 10)
    card.end(694, leaving=4 * GIB)
    device = card.device(6)
    assert device.undivided is not None
    assert device.undivided.pids == (695, 696, 702)

    card.end(695)
    device = card.device(2)
    assert device.undivided is not None
    assert device.undivided.pids == (696, 702)

    card.end(696)
    assert given_to(card.device(2), 702) == (0, about(4 * GIB)), "its GPU has not answered yet"
    assert given_to(card.device(6), 702) == (about(4 * GIB), about(4 * GIB))


@pytest.mark.parametrize("lists", [False, True])
def test_a_gpu_whose_holders_were_never_known_settles_nothing(lists: bool) -> None:
    """Where another GPU has never said who holds it, somebody there may have the bytes too."""
    card = Card()
    card.fail(1, 0, 5)
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.sample(6 if lists else 3)
    card.end(694, leaving=4 * GIB)

    device = card.device(12)

    least = about(4 * GIB) if lists else 0
    assert given_to(device, 702) == (least, about(4 * GIB))
    uncharged = holding(device, 702).uncharged
    assert uncharged is not None
    assert ("a process that NVML does not list here can have them too" in uncharged.why) is not lists


def test_memory_that_only_a_rank_on_another_gpu_can_have() -> None:
    """Memory that nobody on its GPU can have is named after the only process that can, while that lives."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(695, Managed(), user="alice", gpu=1)
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)
    assert [(each.pid, each.user, each.pids) for each in device.left] == [(694, "alice", (695,))]
    card.start(702, Managed(), user="bob")
    device = card.device(6)
    assert given_to(device, 702) == (0, 0), "it came later"
    card.end(695, leaving=-4 * GIB)
    assert card.device(6).left == ()


def test_a_creator_that_shared_in_its_last_second() -> None:
    """A creator that took 4 GiB after the last sample, shared them and was killed, made all of them."""
    card = Card()
    card.start(694, Managed())
    card.start(702, Managed())
    card.start(7, Managed(mapped=8 * GIB))
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 7)[0] == 0


def test_one_that_had_managed_memory_and_shared_some_other() -> None:
    """A killed program takes its managed memory along; what it had shared stays, also if that is as much."""
    card = Card()
    card.sample()
    card.start(694, Managed(charged=4 * GIB, resident=4 * GIB, mapped=4 * GIB))
    card.start(702, Managed())
    card.sample(4)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert given_to(device, 702)[0] == about(4 * GIB)


def test_the_last_importer_takes_the_bytes_along() -> None:
    """When the importer ends and the bytes go, a neighbour with managed memory keeps exactly its own."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB))
    card.start(702, Managed())
    card.sample(2)
    card.start(7, Managed(resident=8 * GIB, mapped=9 * GIB))
    card.sample(4)
    card.end(694, leaving=4 * GIB)
    card.sample(6)
    card.nobody[0] = 0
    card.end(702)

    assert given_to(card.device(6), 7) == (about(8 * GIB), about(8 * GIB))


def test_a_program_on_two_devices_has_no_more_than_it_maps() -> None:
    """Bytes on two devices that are more than a program maps are not all its own: neither part is given."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB, resident=8 * GIB), Managed(mapped=0))
    card.nobody[1] = 4 * GIB

    snapshot = card.sample(3)

    least = [given_to(device, 7)[0] for device in snapshot.devices]
    assert sum(least) <= 8 * GIB
    assert least[1] == 0


def test_a_program_on_two_devices_within_its_mapping() -> None:
    """Bytes on two devices that its mappings allow together are exact on each of them."""
    card = Card()
    card.start(7, Managed(mapped=8 * GIB, resident=3 * GIB), Managed(resident=2 * GIB))

    snapshot = card.sample(3)

    assert [given_to(device, 7)[0] for device in snapshot.devices] == [3 * GIB, 2 * GIB]


def test_more_bytes_than_all_mappings_are_nobodys() -> None:
    """Where the bytes are more than all holders can have, none is given to a holder that may have none."""
    card = Card()
    card.sample()
    card.start(7, Managed(mapped=8 * GIB))
    card.nobody[0] = 12 * GIB

    device = card.device()

    assert given_to(device, 7) == (0, about(8 * GIB))
    assert device.ledger is not None
    assert device.ledger.unattributed >= 12 * GIB


def test_mappings_that_are_not_readable_make_a_range() -> None:
    """A holder whose mappings we may not read may have the bytes too; alone it proves nothing."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    card.start(8, Managed(mapped=None))

    device = card.device()

    assert given_to(device, 7) == (0, about(8 * GIB))
    assert device.undivided is not None

    other = Card()
    other.start(8, Managed(mapped=None))
    other.nobody[0] = 8 * GIB
    alone = other.device()
    assert alone.undivided is None
    assert alone.ledger is not None
    assert alone.ledger.unattributed >= 8 * GIB


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
    card = Card()
    card.start(694, Managed(charged=4 * GIB))
    card.start(702, Managed())
    card.start(703, Managed())
    card.host.processes[1].fates["stopped"] = 0.0
    card.sample(3)
    card.end(694, leaving=4 * GIB)

    device = card.device(6)

    assert device.undivided is not None
    assert (device.undivided.state, device.undivided.wasted) == (State.ACTIVE, False)
    assert device.wasted is not None
    assert device.wasted < GIB


def test_a_driver_that_hides_its_reserve_gives_nothing() -> None:
    """Where the driver counts its reserve as used, nothing is given: the bytes may be the driver's."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    memory = card.host.reading(0.5).devices[0].memory
    assert memory is not None
    card.host.gpus[0].says["memory"] = memory._replace(reserved=None)

    device = card.device()

    assert holding(device, 7).uncharged is None


def test_blind_gives_nothing() -> None:
    """Outside the host's PID namespace the bytes are unknown, and nobody gets them."""
    card = Card()
    card.start(7, Managed(resident=8 * GIB, mapped=8 * GIB))
    snapshot = card.exporter.sample(1.0, host_pid_namespace=False)
    assert all(each.uncharged is None for device in snapshot.devices for each in device.holdings)


def test_the_clock_may_be_set() -> None:
    """A clock that was set moves the time of an end along."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB))
    card.start(702, Managed())
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    before = card.device(6).left[0].ended
    ahead = card.exporter.sample(card.now + 1, boot_time=600 + 3600, time=EPOCH + 3600 + card.now + 1)
    assert ahead.devices[0].left[0].ended == before + 3600


ACTIONS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 16)), max_size=40)


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
def test_no_byte_goes_to_a_wrong_holder(actions: list[tuple[int, int, int]]) -> None:
    """Programs that start, move their pages one at a time, share and die: no holder gets another's bytes."""
    card = Card()
    card.sample()
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
            gone = heirs.pop(chosen, 0)
            card.nobody[0] -= gone
            del programs[chosen]
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
    card = Card()
    card.sample()
    first = card.start(7, Managed(resident=6 * GIB, mapped=8 * GIB))
    card.sample(4)
    first.resident -= 3 * MIB
    card.start(8, Managed(mapped=12 * GIB))

    device = card.device(5)

    assert given_to(device, 7)[0] == about(6 * GIB)
    assert given_to(device, 8)[1] < GIB


def test_an_agent_proves_its_managed_pool() -> None:
    """An agent whose pool is larger than what NVML charges, and as large as the mappings, proves them."""
    card = Card()
    card.sample()
    card.start(7, Managed(charged=MIB, resident=8 * GIB, mapped=8 * GIB, pool=8 * GIB), agent=True)
    snapshot = card.sample(4)

    uncharged = holding(snapshot.devices[0], 7).uncharged
    assert uncharged is not None
    assert (uncharged.least, uncharged.grade) == (about(8 * GIB), Grade.PROVEN)
    assert "its agent's report of 8.0 GiB" in uncharged.why
    assert snapshot.agents[7].pool(snapshot.devices[0].reading.uuid) == 8 * GIB
