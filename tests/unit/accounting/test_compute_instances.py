"""Compute instances that share the memory of one GPU instance: it is counted once, and blames nobody."""

from msgspec.structs import replace

from tests.support.sure import sure
from vramledger.accounting.devices import memory_sharers
from vramledger.accounting.tracker import HoldingTracker
from vramledger.metrics.devices import FAMILIES
from vramledger.model.reading import DeviceReading, MemoryReading, ProcessEntry, ProcessRow, Reading
from vramledger.model.snapshot import Ledger, Snapshot, State
from vramledger.verdicts.cleanliness import CLEAN, NOT_CLEAN, CheckTolerance, check_devices

GIB = 2**30
WHOLE = DeviceReading(0, "GPU-a", divided=True)
MEMORY = MemoryReading(20 * GIB, 8 * GIB, 12 * GIB, 0)


def instance(uuid: str, gpu: int, compute: int, *held: tuple[int, int]) -> DeviceReading:
    """Make a compute instance of a GPU instance that has 12 of 20 GiB in use."""
    return DeviceReading(
        0,
        uuid,
        minor=0,
        parent="GPU-a",
        gpu_instance=gpu,
        compute_instance=compute,
        memory=MEMORY,
        processes=tuple(ProcessEntry(pid, size, "C") for pid, size in held),
    )


FIRST = instance("MIG-b", 1, 0, (7, 10 * GIB))
SECOND = instance("MIG-a", 1, 1, (8, 2 * GIB))
ALONE = instance("MIG-c", 2, 0, (9, 12 * GIB))


def sampled(*devices: DeviceReading) -> Snapshot:
    """Take one sample of these devices; every holder is alive."""
    pids = [entry.pid for each in devices for entry in each.processes or ()]
    rows = tuple(ProcessRow(pid, pid * 100, "S", 1, pid, pid, 0, 1) for pid in pids)
    reading = Reading(1000.0, 10.0, host_pid_namespace=True, devices=devices, rows=rows)
    return HoldingTracker(idle_after=600).update(reading)


def ledgers(snapshot: Snapshot) -> dict[str, Ledger | None]:
    """Return the ledgers by UUID."""
    return {each.key[1]: each.ledger for each in snapshot.devices}


def test_who_shares_memory() -> None:
    """The instances of one GPU instance do, that with the lowest number first; nobody else does."""
    other = replace(FIRST, uuid="MIG-d", parent="GPU-b")
    found = memory_sharers([WHOLE, SECOND, FIRST, ALONE, other])
    assert found == {"MIG-b": ("MIG-b", "MIG-a"), "MIG-a": ("MIG-b", "MIG-a")}


def test_what_a_sibling_holds_is_not_unattributed() -> None:
    """The ledger is that of the GPU instance: the bytes of each holder are in it, whoever lists it."""
    found = ledgers(sampled(WHOLE, FIRST, SECOND, ALONE))
    for uuid in ("MIG-a", "MIG-b", "MIG-c"):
        ledger = sure(found[uuid])
        assert (ledger.unattributed, ledger.overlap, ledger.states[State.ACTIVE]) == (0, 0, 12 * GIB)


def test_the_memory_is_counted_once() -> None:
    """In sums over devices no byte is twice: the families of the ledger have it under one of them."""
    snapshot = sampled(WHOLE, FIRST, SECOND, ALONE)
    families = {family.name.removeprefix("vramledger_"): family for family in FAMILIES}
    for name in ("device_memory_total_bytes", "device_memory_bytes", "device_memory_used_peak_bytes"):
        read = families[name].read
        assert {each.key[1] for each in snapshot.devices if read(each)} == {"MIG-b", "MIG-c"}
    wasted = families["device_memory_wasted_bytes"].read
    assert {each.key[1] for each in snapshot.devices if wasted(each) is not None} == {
        "MIG-a",
        "MIG-b",
        "MIG-c",
    }


def test_a_sibling_without_a_list_leaves_no_ledger() -> None:
    """What the others hold is not known then, so nothing is called unattributed, and nobody is charged."""
    for changes in ({"processes": None}, {"error": "failed", "processes": None, "memory": None}):
        found = ledgers(sampled(WHOLE, FIRST, replace(SECOND, **changes)))
        assert found == {"GPU-a": None, "MIG-b": None, "MIG-a": None}


def test_check_blames_an_instance_for_its_own_holders() -> None:
    """A holder on one compute instance does not make its sibling dirty."""
    empty = replace(SECOND, processes=())
    full = replace(FIRST, processes=(ProcessEntry(7, 12 * GIB, "C"),))
    results = check_devices(sampled(WHOLE, full, empty), frozenset(), CheckTolerance())
    assert {each.uuid: each.status for each in results} == {"MIG-b": NOT_CLEAN, "MIG-a": CLEAN}
