"""The limits of cgroups, joined with the owners of the holders in them."""

from msgspec.structs import replace

from vramledger.accounting.owners.reservations import PlacedHolding, owner_limits
from vramledger.accounting.tracker import HoldingTracker
from vramledger.metrics import owners
from vramledger.model.reading import (
    CgroupLimit,
    DeviceReading,
    MemoryReading,
    Owner,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
    decode,
    encode,
)
from vramledger.model.snapshot import OwnerLimit
from vramledger.views.table import render_table

GIB = 2**30
ADA, BOB = ("slurm", "41"), ("slurm", "42")
ROOT = CgroupLimit("/slurm", 8 * GIB, 60 * GIB, 50 * GIB)
JOB = CgroupLimit("/slurm/job_41", 4 * GIB, 40 * GIB, 20 * GIB)
STEP = CgroupLimit("/slurm/job_41/step_0", 0, None, 20 * GIB)


def limit_of(limits: list[CgroupLimit], *holdings: PlacedHolding) -> OwnerLimit:
    """Return the limit of the first owner."""
    return owner_limits(limits, holdings)[0]


def test_the_limit_that_is_reached_first_counts() -> None:
    """Of the limits above a holder the one with the least room is shown, with the cgroup that has it."""
    found = limit_of([ROOT, JOB, STEP], PlacedHolding(ADA, "/slurm/job_41/step_0"))
    assert (found.cgroup, found.maximum, found.used) == ("/slurm", 60 * GIB, 50 * GIB)
    found = limit_of([ROOT._replace(current=20 * GIB), JOB, STEP], PlacedHolding(ADA, "/slurm/job_41/step_0"))
    assert (found.cgroup, found.maximum, found.used) == ("/slurm/job_41", 40 * GIB, 20 * GIB)


def test_what_the_kernel_charges_is_an_account_beside_nvmls() -> None:
    """The charge of an owner is that of its cgroups, and none of them is counted twice."""
    places = ["/slurm/job_41", "/slurm/job_41/step_0"]
    found = limit_of([ROOT, JOB, STEP], *(PlacedHolding(ADA, path) for path in places))
    assert (found.charged, found.minimum) == (20 * GIB, 4 * GIB)


def test_guarantees_of_cgroups_beside_each_other_add_up() -> None:
    """An owner is guaranteed what all of its cgroups are, and what is in a cgroup is not counted twice."""
    limits = [
        CgroupLimit(path, minimum * GIB, None, GIB)
        for path, minimum in {"/a": 2, "/a/x": 1, "/b": 3, "/b/x": 5, "/c": 7}.items()
    ]
    found = limit_of(limits, *(PlacedHolding(ADA, path) for path in ("/a", "/a/x", "/b", "/b", "/b/x")))
    assert (found.minimum, found.charged) == (5 * GIB, 2 * GIB)
    found = limit_of(limits, *(PlacedHolding(ADA, path) for path in ("/a/x", "/b/x", "/elsewhere")))
    assert (found.minimum, found.charged) == (4 * GIB, None)


def test_nobody_is_guaranteed_more_than_the_cgroup_above() -> None:
    """A parent's guarantee bounds those of its children together, also where it is 0."""
    low, more = ROOT._replace(minimum=3 * GIB), CgroupLimit("/slurm/job_42", 2 * GIB, None, GIB)
    both = [PlacedHolding(ADA, path) for path in (JOB.cgroup, more.cgroup)]
    assert limit_of([low, JOB, more], both[0]).minimum == 3 * GIB
    assert limit_of([ROOT, JOB, more], *both).minimum == 6 * GIB
    assert limit_of([low, JOB, more], *both).minimum == 3 * GIB
    assert limit_of([ROOT._replace(minimum=0), JOB], both[0]).minimum == 0
    assert limit_of([JOB], both[0]).minimum == 4 * GIB
    assert limit_of([ROOT._replace(minimum=None), JOB], both[0]).minimum is None


def test_what_is_not_known_is_not_zero() -> None:
    """A cgroup without a figure or a guarantee, an owner without a cgroup, and a path outside give none."""
    silent = CgroupLimit("/b", None, None, GIB)
    found = limit_of([JOB, silent], *(PlacedHolding(ADA, path) for path in (JOB.cgroup, "/b")))
    assert (found.minimum, found.charged) == (None, 21 * GIB)
    assert limit_of([ROOT], PlacedHolding(ADA, "/slurm/elsewhere")).minimum is None
    assert limit_of([JOB._replace(current=None)], PlacedHolding(ADA, JOB.cgroup)).charged is None
    assert limit_of([JOB], PlacedHolding(ADA, JOB.cgroup), PlacedHolding(ADA, "/elsewhere")).charged is None
    assert owner_limits([JOB], [PlacedHolding(ADA, None)]) == ()
    assert owner_limits([JOB], [PlacedHolding(ADA, "/user.slice")]) == ()
    assert owner_limits(None, [PlacedHolding(ADA, JOB.cgroup)]) == ()
    assert owner_limits([JOB], [PlacedHolding(ADA, "/../job_41")]) == ()


def test_a_cgroup_of_several_owners_is_charged_to_none_of_them() -> None:
    """Where another owner, or one that is not known, may be in the same cgroup, no charge is shown."""
    for other in ((BOB, "/slurm/job_41/x"), (None, JOB.cgroup), (BOB, None)):
        found = limit_of([ROOT, JOB], PlacedHolding(ADA, JOB.cgroup), PlacedHolding(*other))
        assert (found.charged, found.maximum) == (None, 60 * GIB)


def test_limits_are_served_and_shown() -> None:
    """An owner's limit, what is taken of it and its charge are in metrics, table and recording."""
    facts = ProcessFacts(7, 70, 1000, "ada", cgroup=("0::/slurm/job_41",), owner=Owner("slurm", "41"))
    device = DeviceReading(
        0, "GPU-a", minor=0, memory=MemoryReading(80 * GIB, 59 * GIB, 20 * GIB, GIB),
        processes=(ProcessEntry(7, 20 * GIB, "C"),), limits=(ROOT._replace(current=20 * GIB), JOB),
        partition=70 * GIB,
    )  # fmt: skip
    row = ProcessRow(7, 70, "S", 1, 7, 7, 0, 1)
    reading = Reading(1000.0, 10.0, host_pid_namespace=True, devices=(device,), rows=(row,), facts=(facts,))
    assert decode(encode(reading)) == reading
    snapshot = HoldingTracker(idle_after=600).update(reading)
    served = {
        family.name.removeprefix("vramledger_owner_memory_"): dict(samples)
        for family, samples in owners.collect(snapshot)
    }
    key = ("0", "GPU-a", "slurm", "41")
    assert served["limit_bytes"] == {(*key, "max"): 40 * GIB, (*key, "min"): 4 * GIB}
    assert (served["limit_used_bytes"], served["charged_bytes"]) == ({key: 20 * GIB}, {key: 20 * GIB})
    table = render_table(snapshot)
    assert "limit: slurm 41 may take 40.00 GiB, 20.00 GiB is taken (/slurm/job_41)" in table
    assert "PARTITION: NVML shows us only the 70.00 GiB" in table
    bare = replace(reading, devices=(replace(device, limits=None, partition=None),))
    absent = dict(owners.collect(HoldingTracker(idle_after=600).update(bare)))
    assert not absent[owners.OWNER_LIMIT]
    assert not absent[owners.OWNER_CHARGED]
