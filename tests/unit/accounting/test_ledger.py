"""The balance of a device, of memory that the operating system manages, and of shared instances."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.host.model import GIB, MIB
from tests.support.sure import sure
from vramledger.accounting.devices import memory_sharers
from vramledger.accounting.ledger import SystemBytes, balance, system_bytes
from vramledger.accounting.tracker import HoldingTracker
from vramledger.metrics.devices import FAMILIES
from vramledger.model.reading import (
    DeviceReading,
    ManagedMappings,
    MemoryReading,
    NodeMemory,
    ProcessEntry,
    ProcessRow,
    Reading,
)
from vramledger.model.snapshot import DeviceSnapshot, Ledger, Snapshot, State
from vramledger.verdicts.cleanliness import CLEAN, NOT_CLEAN, CheckTolerance, check_devices
from vramledger.views.ledger_json import snapshot_json
from vramledger.views.table import render_table

amounts = st.integers(min_value=0, max_value=2**48)
holdings = st.lists(st.tuples(st.sampled_from(State), amounts), max_size=50)
TOTAL, RESERVED = 96 * GIB, GIB
WHOLE = DeviceReading(0, "GPU-a", divided=True)
MEMORY = MemoryReading(20 * GIB, 8 * GIB, 12 * GIB, 0)
SERVED = {family.name.removeprefix("vramledger_"): family for family in FAMILIES}


@given(free=amounts, used=amounts, reserved=st.none() | amounts, held=holdings)
def test_the_book_adds_up(free: int, used: int, reserved: int | None, held: list[tuple[State, int]]) -> None:
    """For all figures of the driver, free, reserved, states and unattributed add up to the total."""
    total = free + used + (reserved or 0)
    ledger = sure(balance(MemoryReading(total, free, used, reserved), held))
    unused = ledger.free + (ledger.driver_reserved or 0)
    assert total == unused + sum(ledger.states.values()) + ledger.unattributed
    assert min(*ledger.states.values(), ledger.unattributed, ledger.overlap) >= 0
    assert sum(each for _, each in held) == sum(ledger.states.values()) + ledger.overlap
    assert not (ledger.overlap and ledger.unattributed)
    assert used == ledger.used


def test_what_does_not_add_up() -> None:
    """Bytes without a holder, overlap, an unknown reserve; a contradiction makes no book."""
    memory = MemoryReading(143771 * MIB, 143771 * MIB - 32000 * MIB - 644939776, 32000 * MIB, 644939776)
    ledger = sure(balance(memory, [(State.ACTIVE, 10954 * MIB), (State.IDLE, 21032 * MIB)]))
    assert (ledger.unattributed, ledger.overlap) == (14 * MIB, 0)
    held = [(State.ACTIVE, 50), (State.IDLE, 30), (State.DEAD, 10)]
    ledger = sure(balance(MemoryReading(100, 40, 60, 0), held))
    assert (ledger.states[State.ACTIVE], ledger.states[State.IDLE], ledger.states[State.DEAD]) == (20, 30, 10)
    assert ledger.overlap == 30
    ledger = sure(balance(MemoryReading(100, 40, 60, None), []))
    assert (ledger.driver_reserved, ledger.unattributed) == (None, 60)
    assert balance(MemoryReading(100, 90, 0, 20), []) is None


def coherent(used: int, *held: tuple[int, int], file: int = 0, outside: int = 0) -> DeviceReading:
    """Make a GH200 of which the kernel counts all used bytes but ``outside`` as used."""
    node = NodeMemory(1, TOTAL - RESERVED, TOTAL - RESERVED - used + outside, file, 0, 0)
    return DeviceReading(
        0, "GPU-a", name="NVIDIA GH200 480GB", minor=0,
        memory=MemoryReading(TOTAL, TOTAL - RESERVED - used, used, RESERVED), memory_kind="coherent",
        node=node, processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
    )  # fmt: skip


def unified(available: int, *held: tuple[int, int], uuid: str = "GPU-a", index: int = 0) -> DeviceReading:
    """Make a GB10 on a host of 119 GiB of which this much can be taken."""
    total = 119 * GIB
    return DeviceReading(
        index, uuid, name="NVIDIA GB10", minor=index,
        memory=MemoryReading(total, available, total - available, None), memory_kind="unified",
        processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
    )  # fmt: skip


def sample(tracker: HoldingTracker, now: float, *devices: DeviceReading, namespace: bool = True) -> Snapshot:
    """Take a sample in which every holder is alive, and maps as much managed memory as it likes."""
    pids = {entry.pid for each in devices for entry in each.processes or ()}
    rows = tuple(ProcessRow(pid, pid * 100, "S", 1, pid, pid, 0, 1) for pid in sorted(pids))
    managed = tuple(ManagedMappings(pid, pid * 100, 64 * GIB) for pid in sorted(pids))
    reading = Reading(
        1000 + now, now, boot_id="b", host_pid_namespace=namespace, devices=devices, rows=rows,
        managed=managed, hidden=(), hidden_unreadable=0, device_files=True,
    )  # fmt: skip
    return tracker.update(reading)


def shot(*devices: DeviceReading, namespace: bool = True) -> Snapshot:
    return sample(HoldingTracker(idle_after=600), 0, *devices, namespace=namespace)


def sampled(*devices: DeviceReading, namespace: bool = True) -> DeviceSnapshot:
    return shot(*devices, namespace=namespace).devices[0]


@given(
    free=amounts,
    used=amounts,
    held=st.lists(st.tuples(st.sampled_from(State), amounts), max_size=20),
    system=st.tuples(st.none() | amounts, amounts),
    blind=st.booleans(),
)
def test_the_ledger_balances_whatever_the_kernel_says(
    free: int, used: int, held: list[tuple[State, int]], system: tuple[int | None, int], blind: bool
) -> None:
    """For all figures of the driver and of the kernel, the parts add up, and none is negative."""
    memory = MemoryReading(free + used, free, used, None)
    ledger = sure(balance(memory, held, blind=blind, system=SystemBytes(*system)))
    assert (ledger.operating_system is None) == (blind and system[0] is None)
    parts = (ledger.free, ledger.operating_system or 0, *ledger.states.values(), ledger.unattributed)
    assert sum(parts) == ledger.total
    assert min(*parts, ledger.overlap) >= 0


def test_ordinary_memory_has_no_part_of_the_operating_system() -> None:
    """What does not exist is absent, and not 0."""
    device = replace(coherent(GIB), memory_kind=None, node=None)
    assert system_bytes(device) is None
    ledger = sure(sampled(device).ledger)
    assert (ledger.operating_system, ledger.unattributed) == (None, GIB)


def test_pages_that_stay_belong_to_the_operating_system() -> None:
    """On coherent memory used bytes without a holder are its own, and check finds the GPU clean."""
    left = coherent(40 * GIB, file=3 * GIB)
    tracker = HoldingTracker(idle_after=600)
    before = sample(tracker, 0, coherent(40 * GIB, (7, 37 * GIB), file=3 * GIB))
    after = sample(tracker, 1, left)
    for snapshot, held in ((before, 37 * GIB), (after, 0)):
        ledger = sure(snapshot.devices[0].ledger)
        assert ledger.operating_system == 40 * GIB - held
        assert (ledger.unattributed, ledger.states[State.ACTIVE]) == (0, held)
        assert all(each.uncharged is None for each in snapshot.devices[0].holdings)
    assert [each.status for each in check_devices(after, (), CheckTolerance())] == [CLEAN]
    blamed = shot(replace(left, memory_kind=None))
    assert [each.status for each in check_devices(blamed, (), CheckTolerance())] == [NOT_CLEAN]


def test_an_owner_is_not_blamed_for_pages_that_stay() -> None:
    """Whether the bytes of an ended program are free is neither claimed nor denied there."""
    tracker = HoldingTracker(idle_after=600)
    sample(tracker, 0, coherent(40 * GIB, (7, 37 * GIB)))
    for moment in range(1, 12):
        snapshot = sample(tracker, moment, coherent(40 * GIB))
    usage = sure(snapshot.devices[0].owner_usage)
    assert [(each.freed, each.not_freed) for each in usage.owners] == [(None, 0)]


def test_what_the_kernel_does_not_tell() -> None:
    """Bytes that it does not count, a node that is not readable, and a view without holders blame nobody."""
    ledger = sure(sampled(coherent(40 * GIB, (7, 10 * GIB), outside=5 * GIB)).ledger)
    # RESERVED is not in the node, so up to as many bytes may be the driver's.
    assert (ledger.operating_system, ledger.unattributed) == (26 * GIB, 4 * GIB)
    ledger = sure(sampled(replace(coherent(40 * GIB, (7, 10 * GIB)), node=None)).ledger)
    assert (ledger.operating_system, ledger.unattributed) == (30 * GIB, 0)
    ledger = sure(sampled(coherent(40 * GIB, file=3 * GIB), namespace=False).ledger)
    assert (ledger.operating_system, ledger.states[State.UNKNOWN]) == (3 * GIB, 37 * GIB)


UNREADABLE = replace(coherent(40 * GIB), node=None)


@pytest.mark.parametrize("device", [unified(79 * GIB), UNREADABLE], ids=["unified", "unreadable node"])
def test_what_the_operating_system_holds_is_not_0_where_it_is_not_known(device: DeviceReading) -> None:
    """Where neither the holders nor the kernel's own bytes are known, all used bytes are unknown."""
    snapshot = shot(device, namespace=False)
    ledger = sure(snapshot.devices[0].ledger)
    assert (ledger.operating_system, ledger.states[State.UNKNOWN]) == (None, 40 * GIB)
    served = SERVED["device_memory_bytes"].read(snapshot.devices[0])
    assert isinstance(served, Mapping)
    assert "operating_system" not in served
    assert "operating system" not in render_table(snapshot)


@pytest.mark.parametrize("device", [unified(79 * GIB), UNREADABLE], ids=["unified", "unreadable node"])
def test_a_blind_sample_judges_no_owner_by_such_memory(device: DeviceReading) -> None:
    """What an owner has freed stays unknown there, also when its end falls into samples without a view."""
    held = replace(device, processes=(ProcessEntry(7, 30 * GIB, "C"),))
    tracker = HoldingTracker(idle_after=600)
    sample(tracker, 0, held)
    for moment in range(1, 12):
        usage = sure(sample(tracker, moment, device, namespace=False).devices[0].owner_usage)
        assert [(each.freed, each.not_freed) for each in usage.owners] == [(None, 0)]


def test_check_of_unified_memory() -> None:
    """A busy host is clean, a holder is not, a blind view says so, and no driver's reserve is missed."""
    (blind,) = check_devices(shot(unified(79 * GIB), namespace=False), (), CheckTolerance())
    assert [reason.kind for reason in blind.reasons] == ["blind"]
    (empty,) = check_devices(shot(unified(19 * GIB)), (), CheckTolerance())
    assert (empty.status, empty.reasons) == (CLEAN, ())
    (held,) = check_devices(shot(unified(19 * GIB, (7, GIB))), (), CheckTolerance())
    assert held.status == NOT_CLEAN


def test_unified_memory_has_a_ledger() -> None:
    """On a GB10 the rest of the used memory is the operating system's; an excess of holdings is overlap."""
    ledger = sure(sampled(unified(79 * GIB, (7, 30 * GIB))).ledger)
    assert (ledger.total, ledger.free, ledger.used) == (119 * GIB, 79 * GIB, 40 * GIB)
    assert (ledger.operating_system, ledger.unattributed, ledger.overlap) == (10 * GIB, 0, 0)
    assert ledger.states[State.ACTIVE] == 30 * GIB
    ledger = sure(sampled(unified(100 * GIB, (7, 30 * GIB))).ledger)
    assert (ledger.overlap, ledger.operating_system, ledger.states[State.ACTIVE]) == (11 * GIB, 0, 19 * GIB)


def test_two_gpus_on_one_hosts_memory_count_it_once() -> None:
    """Where two devices use the host's memory, it is counted under the first, with the holders of both."""
    other = unified(79 * GIB, (8, 5 * GIB), uuid="GPU-b", index=1)
    first, second = shot(unified(79 * GIB, (7, 30 * GIB)), other).devices
    assert first.ledger is not None
    assert (first.memory_counted_under, second.memory_counted_under) == (None, "GPU-a")
    assert (first.ledger.operating_system, first.ledger.states[State.ACTIVE]) == (5 * GIB, 35 * GIB)


def test_shared_memory_is_not_called_page_cache() -> None:
    """The text shows what the kernel can drop apart from shared memory and tmpfs, which it cannot."""
    device = coherent(40 * GIB, file=9 * GIB)
    text = render_table(shot(replace(device, node=sure(device.node)._replace(shared=6 * GIB))))
    assert "page cache 3.00 GiB, shared memory and tmpfs 6.00 GiB, memory of programs" in text
    assert "page cache, shared memory and tmpfs 9.00 GiB, memory of programs" in render_table(shot(device))


@pytest.mark.parametrize("device", [coherent(40 * GIB, file=3 * GIB), unified(79 * GIB)])
def test_people_are_told_what_the_operating_system_holds(device: DeviceReading) -> None:
    """The table and the JSON name the bytes and what they are."""
    snapshot = shot(device)
    told = snapshot_json(snapshot)["devices"]
    assert isinstance(told, list)
    assert isinstance(told[0], dict)
    assert told[0]["memory_kind"] == device.memory_kind
    assert str(told[0]["about_operating_system"]) in render_table(snapshot)
    assert "operating system 40.00 GiB" in render_table(snapshot)


def instance(uuid: str, gpu: int, compute: int, *held: tuple[int, int]) -> DeviceReading:
    """Make a compute instance of a GPU instance that has 12 of 20 GiB in use."""
    return DeviceReading(
        0, uuid, minor=0, parent="GPU-a", gpu_instance=gpu, compute_instance=compute, memory=MEMORY,
        processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
    )  # fmt: skip


FIRST = instance("MIG-b", 1, 0, (7, 10 * GIB))
SECOND = instance("MIG-a", 1, 1, (8, 2 * GIB))
ALONE = instance("MIG-c", 2, 0, (9, 12 * GIB))


def ledgers(snapshot: Snapshot) -> dict[str, Ledger | None]:
    return {each.key[1]: each.ledger for each in snapshot.devices}


def test_who_shares_memory() -> None:
    """The instances of one GPU instance do, that with the lowest number first; nobody else does."""
    found = memory_sharers([WHOLE, SECOND, FIRST, ALONE, replace(FIRST, uuid="MIG-d", parent="GPU-b")])
    assert found == {"MIG-b": ("MIG-b", "MIG-a"), "MIG-a": ("MIG-b", "MIG-a")}


def test_what_a_sibling_holds_is_not_unattributed() -> None:
    """The ledger is that of the GPU instance: the bytes of each holder are in it, whoever lists it."""
    found = ledgers(shot(WHOLE, FIRST, SECOND, ALONE))
    for uuid in ("MIG-a", "MIG-b", "MIG-c"):
        ledger = sure(found[uuid])
        assert (ledger.unattributed, ledger.overlap, ledger.states[State.ACTIVE]) == (0, 0, 12 * GIB)


def test_the_memory_is_counted_once() -> None:
    """In sums over devices no byte is twice: the families of the ledger have it under one of them."""
    devices = shot(WHOLE, FIRST, SECOND, ALONE).devices
    for name in ("device_memory_total_bytes", "device_memory_bytes", "device_memory_used_peak_bytes"):
        assert {each.key[1] for each in devices if SERVED[name].read(each)} == {"MIG-b", "MIG-c"}
    wasted = SERVED["device_memory_wasted_bytes"].read
    assert {each.key[1] for each in devices if wasted(each) is not None} == {"MIG-a", "MIG-b", "MIG-c"}


def test_a_sibling_without_a_list_leaves_no_ledger() -> None:
    """What the others hold is not known then, so nothing is called unattributed, and nobody is charged."""
    for changes in ({"processes": None}, {"error": "failed", "processes": None, "memory": None}):
        found = ledgers(shot(WHOLE, FIRST, replace(SECOND, **changes)))
        assert found == {"GPU-a": None, "MIG-b": None, "MIG-a": None}
