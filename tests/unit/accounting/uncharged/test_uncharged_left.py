"""Bytes that NVML charges to nobody after their creator has ended: who still has them, and who has not."""

import pytest

from tests.support.host.model import CONTEXT, GIB, Gpu
from tests.support.sure import sure
from tests.support.uncharged_card import Card, Managed, about, given_to, holding
from vramledger.model.reading import HiddenHolder


def test_a_handle_of_a_killed_creator() -> None:
    """What a killed program had shared is the other's, and the evidence says who made it, and when."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    device = card.device(6)
    assert given_to(device, 702)[0] == about(4 * GIB)
    uncharged = sure(holding(device, 702).uncharged)
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
    assert all(sum(each.held.values()) < GIB for each in sure(device.owner_usage).owners)


def test_two_importers_of_one_owner() -> None:
    """With two importers of one owner the bytes are the owner's, although not one holding's."""
    card = Card()
    card.start(694, Managed(charged=4 * GIB), user="alice")
    card.start(702, Managed(), user="bob")
    card.start(703, Managed(), user="bob")
    card.sample(3)
    card.end(694, leaving=4 * GIB)
    device = card.device(6)
    assert sure(device.undivided).owner == ("user", "bob")
    assert device.owner_usage is not None
    (bob,) = [each for each in device.owner_usage.owners if each.name == "bob"]
    assert sum(bob.held.values()) == about(2 * CONTEXT + 4 * GIB)
    (alice,) = [each for each in device.owner_usage.owners if each.name == "alice"]
    assert alice.not_freed == 0
    assert alice.freed == about(CONTEXT)


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
    assert sure(device.ledger).unattributed == 4 * GIB
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
    assert sure(device.undivided).pids == (702,)


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
    uncharged = sure(holding(device, 702).uncharged)
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
    assert sure(device.undivided).pids == (695, 702)


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
    assert sure(device.undivided).pids == (696, 702)
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
    uncharged = sure(holding(device, 702).uncharged)
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
