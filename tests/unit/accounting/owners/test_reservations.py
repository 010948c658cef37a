"""Reserved and held memory: the join, and how page, table, JSON, check and recordings show it."""

from typing import Any

import pytest

from tests.support import builders
from tests.support.host.one_holder import PID, START, OneHolder
from tests.support.sure import sure
from vramledger.accounting.owners.reservations import fits, mps_clients
from vramledger.metrics import processes, reservations
from vramledger.model.reading import (
    DeviceReading,
    Grant,
    Owner,
    ParentFacts,
    ProcessEntry,
    ProcessFacts,
    ProcessRow,
    Reading,
    Scheduler,
    decode,
    encode,
)
from vramledger.model.snapshot import Reservation, ReservationStatus, Snapshot
from vramledger.sampling.masking import Mask
from vramledger.verdicts import cleanliness
from vramledger.views.evidence import evidence_lines
from vramledger.views.ledger_json import snapshot_json
from vramledger.views.table import render_table

GPU = "GPU-7"
POD = Owner("pod", "ml/train-0", namespace="ml", pod="train-0", container="main")
NAMELESS = Owner("pod", "0f1e-22", pod="0f1e-22")
JOB = Owner("slurm", "42", slurm_job="42", unit="slurmstepd.scope")
USER = Owner("user", "ada")

KUBELET = Scheduler("kubelet", (GPU,), (Grant("pod", "ml/train-0", (GPU,)),))
SLURM = Scheduler("slurm", ("*",), (Grant("slurm", "42", ("nvidia0",)),))
NOMAD_SCOPE = "/nomad.slice/share.slice/5b3b6f0e.worker.scope"
NOMAD = Scheduler("nomad", (GPU,), (Grant("nomad", "train/worker/5b3b6f0e", (GPU,), NOMAD_SCOPE),))
CONTROL = ParentFacts(6, 1, "nvidia-cuda-mps", "x", init=False, uid=0, program="nvidia-cuda-mps-control")
MIG = DeviceReading(0, "MIG-a", minor=3, parent="GPU-p", mig_profile="1g", gpu_instance=9, compute_instance=0)
WHOLE = DeviceReading(0, "GPU-p", minor=3)


def sampled(
    owner: Owner | None,
    *schedulers: Scheduler,
    cgroup: tuple[str, ...] = ("0::/x",),
    command: str = "train.py",
    parent: ParentFacts | None = None,
    **changes: Any,  # noqa: ANN401 any field of a reading
) -> Snapshot:
    """Take a sample of one device, GPU-7 at /dev/nvidia0, with one holder of an owner."""
    host = OneHolder()
    host.gpu.uuids = ((0.0, GPU),)
    facts = ProcessFacts(PID, START, user="ada", command=command, cgroup=cgroup, owner=owner, parent=parent)
    return host.sample(schedulers=schedulers, facts=(facts,), **changes)


def reservation_status(snapshot: Snapshot) -> ReservationStatus | None:
    (device,) = snapshot.devices
    return device.reservation_status


def shown(snapshot: Snapshot) -> dict[str, Any]:
    """Return the only device as the JSON has it."""
    devices: Any = snapshot_json(snapshot)["devices"]
    (device,) = devices
    return dict(device)


@pytest.mark.parametrize(
    ("owner", "cgroup", "scheduler", "held", "unreserved"),
    [
        (POD, ("0::/x",), KUBELET, True, ()),
        (Owner("pod", "ml/other", namespace="ml", pod="other"), ("0::/x",), KUBELET, False, (7,)),
        (NAMELESS, ("0::/x",), KUBELET, None, ()),
        (USER, ("0::/x",), KUBELET, False, (7,)),
        (None, ("0::/x",), KUBELET, None, ()),
        (JOB, ("0::/x",), SLURM, True, ()),
        (JOB._replace(slurm_job="43"), ("0::/x",), SLURM, False, (7,)),
        (JOB._replace(slurm_job="s5K1KKYAYG5D00"), ("0::/x",), SLURM, None, ()),
        (USER, ("0::/x",), SLURM, False, (7,)),
        (USER, (f"0::{NOMAD_SCOPE}/below",), NOMAD, True, ()),
        (USER, (f"0::/../..{NOMAD_SCOPE}",), NOMAD, True, ()),
        (USER, ("0::/../5b3b6f0e.worker.scope",), NOMAD, True, ()),  # we are beside it
        (USER, (f"0::/../ada.service{NOMAD_SCOPE}",), NOMAD, False, (7,)),
        (USER, ("0::/ada.service/5b3b6f0e.worker.scope",), NOMAD, False, (7,)),
        (USER, (f"6:freezer:/ada{NOMAD_SCOPE}",), NOMAD, False, (7,)),
        (USER, ("6:freezer:/share.slice/5b3b6f0e.worker.scope",), NOMAD, False, (7,)),
        (USER, (f"0::/user.slice/user@1000.service{NOMAD_SCOPE}",), NOMAD, False, (7,)),
        (USER, ("0::/nomad.slice/share.slice/other.scope",), NOMAD, False, (7,)),
    ],
)
def test_who_holds_what_is_reserved(
    owner: Owner | None,
    cgroup: tuple[str, ...],
    scheduler: Scheduler,
    held: bool | None,
    unreserved: tuple[int, ...],
) -> None:
    """A reservation is held by its owner's processes; a holder without a certain owner is not blamed."""
    (grant,) = scheduler.grants
    reserved = Reservation(grant.type, grant.name, scheduler.name, held)
    found = reservation_status(sampled(owner, scheduler, cgroup=cgroup))
    assert found == ReservationStatus((reserved,), unreserved, (scheduler.name,))


def test_without_a_scheduler_there_is_nothing() -> None:
    """On a host without a scheduler, and for a GPU that no scheduler manages, nothing is reported."""
    assert reservation_status(sampled(USER)) is None
    assert reservation_status(sampled(USER, Scheduler("kubelet", ("GPU-other",), ()))) is None
    assert shown(sampled(USER))["reservations"] is None
    assert not any(samples for _, samples in reservations.collect(sampled(USER)))


def test_who_needs_a_reservation() -> None:
    """On a managed device a holder has one of either scheduler, read since it came, or it has none."""
    without = reservation_status(sampled(POD, KUBELET._replace(grants=())))
    assert without == ReservationStatus((), (7,), ("kubelet",))
    found = sure(reservation_status(sampled(JOB, KUBELET, SLURM)))
    assert {each.name: each.held for each in found.reservations} == {"ml/train-0": False, "42": True}
    assert found.unreserved_pids == ()
    found = sure(reservation_status(sampled(USER, SLURM, schedulers_read=1e12)))
    assert found.unreserved_pids == (7,)


CLAIMS = Scheduler("nomad", (), tuple(each._replace(claimed=True) for each in NOMAD.grants))


@pytest.mark.parametrize(
    ("schedulers", "unreserved"),
    [
        ((CLAIMS,), None),
        ((CLAIMS, KUBELET._replace(managed=("GPU-other",))), None),
        ((CLAIMS, SLURM), (7,)),  # by Slurm
        ((CLAIMS._replace(complete=False), SLURM), None),
    ],
)
def test_what_a_job_says_of_itself_blames_nobody(
    schedulers: tuple[Scheduler, ...], unreserved: tuple[int, ...] | None
) -> None:
    """A claim is shown, and makes no device one of which others need a reservation."""
    found = sure(reservation_status(sampled(USER, *schedulers)))
    assert found.unreserved_pids == unreserved
    assert Reservation("nomad", NOMAD.grants[0].name, "nomad", False) in found.reservations


@pytest.mark.parametrize(
    "changes",
    [
        {"schedulers": (KUBELET._replace(complete=False),)},
        {"host_pid_namespace": False},
        {"schedulers_read": -1.0},  # before the holder was first seen
        {"schedulers": (KUBELET._replace(grants=(Grant("pod", "ml/other", ("gpu-0-mig-9-4-4",)),)),)},
    ],
)
def test_nobody_is_blamed_in_doubt(changes: dict[str, Any]) -> None:
    """Hidden grants, invisible holders and an id that fits no device: not known."""
    owner = Owner("pod", "ml/other", namespace="ml", pod="other")
    schedulers = changes.pop("schedulers", (KUBELET,))
    assert not sure(reservation_status(sampled(owner, *schedulers, **changes))).unreserved_pids


@pytest.mark.parametrize(
    ("parent", "command", "unreserved"),
    [
        (CONTROL, "nvidia-cuda-mps-server", ()),
        (CONTROL, "renamed", ()),
        (CONTROL._replace(uid=1000, user="ada"), "nvidia-cuda-mps-server", (7,)),  # ada's own daemon
        (CONTROL._replace(program="bash"), "nvidia-cuda-mps-server", (7,)),
        (CONTROL._replace(program=""), "renamed", ()),  # without the right to see it
        (CONTROL._replace(program="", comm="sudo"), "nvidia-cuda-mps-server", (7,)),
        (CONTROL._replace(program="", uid=1000), "nvidia-cuda-mps-server", (7,)),  # its main thread has ended
        (None, "nvidia-cuda-mps-server", (7,)),
    ],
)
def test_mps_unreserved(parent: ParentFacts | None, command: str, unreserved: tuple[int, ...]) -> None:
    """A server of root's daemon holds the context of clients who have reservations; a name proves nothing."""
    found = sure(reservation_status(sampled(USER, SLURM, command=command, parent=parent)))
    assert found.unreserved_pids == unreserved


@pytest.mark.parametrize(
    ("parent", "listed", "clients"),
    [
        (CONTROL, None, {7, 8}),
        (CONTROL, {9}, {9}),
        (CONTROL, set(), set()),  # the driver says that nobody is one
        (CONTROL._replace(uid=1000), None, set()),  # a file of the user's own may have this name
        (CONTROL._replace(uid=1000, program=""), None, set()),
        (CONTROL._replace(program="bash"), None, set()),
        (None, None, set()),
    ],
)
def test_a_name_makes_no_holder_a_client_of_mps(
    parent: ParentFacts | None, listed: set[int] | None, clients: set[int]
) -> None:
    """The driver's list decides; without one only root's daemon does, for the user of its server."""
    users = {7: 1000, 8: 1000, 9: 1001}  # 10: not known
    facts = {
        pid: ProcessFacts(pid, 7, uid, command="nvidia-cuda-mps-server", parent=parent if pid == 7 else None)
        for pid, uid in users.items()
    }
    holders = tuple(ProcessEntry(pid, 1, "CM" if pid in (listed or ()) else "C") for pid in (*users, 10))
    device = DeviceReading(0, GPU, processes=holders, mps_listed=listed is not None)
    rows = {each.pid: ProcessRow(each.pid, 7, "S", 1, 7, 7, 0, 1) for each in holders}
    assert mps_clients(device, rows, lambda pid, _start: facts.get(pid)) == clients


@pytest.mark.parametrize(
    ("name", "device", "meant"),
    [
        ("*", WHOLE, True), ("GPU-p", WHOLE, True), ("GPU-p::3", WHOLE, True), ("GPU-q", WHOLE, False),
        ("nvidia3", WHOLE, True), ("nvidia3/vgpu1", WHOLE, True), ("nvidia33", WHOLE, False),
        ("gpu-3", WHOLE, True), ("gpu-3-mig-9-4-4", WHOLE, False), ("MIG-a", MIG, True),
        ("MIG-a", WHOLE, False), ("GPU-p", MIG, True), ("nvidia3/gi9", MIG, True),
        ("nvidia3/gi8", MIG, False), ("nvidia3/gi9", WHOLE, False), ("MIG-GPU-p/9/0", MIG, True),
        ("MIG-GPU-p/9/1", MIG, False), ("", WHOLE, False), ("nvidia", WHOLE, False),
    ],
)  # fmt: skip
def test_a_schedulers_word_for_a_device(name: str, device: DeviceReading, meant: bool) -> None:
    """UUIDs, device file numbers, replicas, and a whole GPU for all of its instances."""
    assert fits(name, device) is meant


def values(snapshot: Snapshot) -> dict[str, dict[tuple[str, ...], float]]:
    """Return the samples of the reservations' families, without gpu and uuid."""
    return {
        family.name.removeprefix("vramledger_device_"): {labels[2:]: value for labels, value in samples}
        for family, samples in reservations.collect(snapshot)
    }


def test_the_page() -> None:
    """Who has a reservation, how many of them hold memory, and what is held without one."""
    assert values(sampled(USER, KUBELET)) == {
        "reservation_info": {("pod", "ml/train-0"): 1},
        "reservations": {("held",): 0, ("unheld",): 1, ("unknown",): 0},
        "unreserved_holders": {(): 1},
        "unreserved_memory_bytes": {(): sampled(USER).devices[0].holdings[0].memory},
        "vramledger_reservation_account_info": {},
    }
    assert values(sampled(POD, KUBELET))["unreserved_holders"] == {(): 0}
    unknown = values(sampled(USER, KUBELET._replace(complete=False)))
    assert unknown["unreserved_holders"] == unknown["unreserved_memory_bytes"] == {}


def test_the_account_of_a_job() -> None:
    """A job with a reservation has its user and account, also without a holder."""
    grant = Grant("slurm", "41", ("nvidia0",), user="bob", account="physics")
    family = reservations.RESERVATION_ACCOUNT_INFO
    collected = dict(reservations.collect(sampled(USER, SLURM._replace(grants=(grant,)))))
    assert collected[family] == [(("slurm", "41", "bob", "physics"), 1)]
    assert dict(reservations.collect(sampled(JOB, SLURM)))[family] == []


def test_table_evidence_and_json() -> None:
    """``show``, ``--why`` and the JSON name unused reservations and unreserved holders."""
    text = render_table(sampled(USER, KUBELET))
    assert "reservation: for pod ml/train-0, which HOLDS NOTHING here" in text
    assert "UNRESERVED: pid 7 holds memory without a reservation; kubelet assigns this GPU" in text
    assert "which holds memory here" in render_table(sampled(POD, KUBELET))
    why = "\n".join(evidence_lines(sampled(USER, KUBELET), 7))
    assert "reservation  by kubelet for pod ml/train-0; its owner is NOT among them" in why
    assert "reservation  " not in "\n".join(evidence_lines(sampled(USER), 7))
    device = shown(sampled(USER, KUBELET))
    unused = {"owner_type": "pod", "owner": "ml/train-0", "scheduler": "kubelet", "held": False}
    assert device["reservations"] == [unused]
    assert device["schedulers"] == ["kubelet"]
    assert [each["unreserved"] for each in device["holdings"]] == [True]


def test_check_names_a_tenant_without_a_reservation() -> None:
    """The line says which process holds without a reservation, and which reservation is not used."""
    (verdict,) = cleanliness.check_devices(sampled(USER, KUBELET), (), cleanliness.CheckTolerance())
    assert verdict.status == cleanliness.NOT_CLEAN
    assert "pid 7 train.py of user ada" in verdict.line
    assert "(without a reservation)" in verdict.line
    assert "reserved for pod ml/train-0, which holds nothing" in verdict.line
    (welcome,) = cleanliness.check_devices(sampled(POD, KUBELET), (), cleanliness.CheckTolerance(live=True))
    assert welcome.status == cleanliness.CLEAN
    assert "reservation" not in welcome.line


@pytest.mark.parametrize("scheduler", [KUBELET, SLURM, NOMAD])
def test_a_recording_replays_what_was_reserved(scheduler: Scheduler) -> None:
    """A line of a recording has everything, and a masked one has the same relations without the names."""
    reading = Reading(1.0, 2.0, schedulers=(scheduler,), hidden_unreadable=3)
    assert decode(encode(reading)) == reading
    cgroup = (f"0::{NOMAD_SCOPE}",)
    owner = {"kubelet": POD, "slurm": JOB, "nomad": USER}[scheduler.name]
    host = OneHolder()
    host.gpu.uuids = ((0.0, GPU),)
    facts = ProcessFacts(PID, START, user="ada", cgroup=cgroup, owner=owner)
    host.now += 1
    masked = decode(encode(Mask().mask_reading(host.reading(schedulers=(scheduler,), facts=(facts,)))))
    line = encode(masked)
    for secret in (b"train", b"GPU-7", b"5b3b6f0e", b"ml/"):
        assert secret not in line
    found = sure(reservation_status(host.exporter.tracker.update(masked)))
    assert [each.held for each in found.reservations] == [True]
    assert found.unreserved_pids == ()


def test_unreadable_files_are_counted() -> None:
    """Holders whose environ, maps or cgroup we may not read are a metric, and doctor reports them."""
    host = OneHolder()
    facts = ProcessFacts(PID, START, user="ada", denied=("environ", "maps"))
    found = dict(processes.collect(host.sample(facts=(facts,), hidden_unreadable=5), 0))[processes.UNREADABLE]
    assert found == [(("environ",), 1), (("maps",), 1), (("cgroup",), 0), (("fd",), 5)]
    not_searched = host.sample(hidden=None, hidden_unreadable=None)
    assert ("fd",) not in dict(dict(processes.collect(not_searched, 0))[processes.UNREADABLE])
    assert dict(processes.collect(builders.failed(), 0))[processes.UNREADABLE] == []
