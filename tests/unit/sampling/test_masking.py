"""A masked recording has no name of a person, a customer, a job or a card."""

from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import pytest

from tests.support.sure import sure
from vramledger.model import reading
from vramledger.model.reading import (
    CgroupLimit,
    DeviceReading,
    Grant,
    HiddenHolder,
    Owner,
    ParentFacts,
    PodLabels,
    ProcessFacts,
    Rank,
    Reading,
    Scheduler,
    XidEvent,
    encode,
)
from vramledger.readers.owners.cgroups import parse_cgroup
from vramledger.sampling.masking import Mask

SECRET = "acme"  # noqa: S105 what must never come out
ID = "8f2b1c4d5be54c2d9d1e0c5e4b1f7a00" * 2
POD = "8f2b1c4d-5be5-4c2d-9d1e-0c5e4b1f7a00"


def facts(**known: Any) -> Reading:  # noqa: ANN401 ProcessFacts' fields
    return Reading(1.0, 1.0, facts=(ProcessFacts(1, 1, **known),))


def parent(comm: str, command: str) -> Reading:
    return facts(parent=ParentFacts(1, 1, comm, command, init=False))


def owner(kind: str, name: str, **known: str) -> Reading:
    return facts(owner=Owner(kind, name, **known))


def device(uuid: str = "GPU-1", **known: Any) -> Reading:  # noqa: ANN401 DeviceReading's fields
    return Reading(1.0, 1.0, devices=(DeviceReading(0, uuid, **known),))


def reserved(name: str = "x", device: str = "GPU-1", kind: str = "pod", **known: Any) -> Reading:  # noqa: ANN401 any field of a grant
    grant = Grant(kind, name, (device,), **known)
    return Reading(1.0, 1.0, schedulers=(Scheduler("kubelet", (), (grant,)),))


def hidden(command: str, user: str | None) -> Reading:
    return Reading(1.0, 1.0, hidden=(HiddenHolder(1, 1, "cuda", command, user, (0,)),))


MASKED = {
    "Reading.boot_id": Reading(1.0, 1.0, boot_id=SECRET),
    "Reading.failure": Reading(1.0, 1.0, failure=("sampler-exit", f"/home/{SECRET}/bin/python ended")),
    "Reading.ended": Reading(1.0, 1.0, ended={1: f"its pod {SECRET} has ended"}),
    "DeviceReading.uuid": device(f"GPU-{SECRET}"),
    "DeviceReading.parent": device(parent=f"{SECRET}-1"),
    "CgroupLimit.cgroup": device(limits=(CgroupLimit(f"/{SECRET}.slice", 0, None, 0),)),
    "XidEvent.uuid": Reading(1.0, 1.0, events=(XidEvent(SECRET, 1, 1.0),)),
    "ProcessFacts.user": facts(user=SECRET),
    "ProcessFacts.comm": facts(comm=SECRET),
    "ProcessFacts.command": facts(command=SECRET),
    "ProcessFacts.cgroup": facts(cgroup=(f"0::/{SECRET}.slice/x", f"1:name={SECRET}:/", SECRET)),
    "ProcessFacts.settings": facts(settings=(("CUDA_MPS_PIPE_DIRECTORY", f"/run/{SECRET}"),)),
    "ParentFacts.comm": parent(SECRET, "bash"),
    "ParentFacts.command": parent("bash", SECRET),
    "ParentFacts.user": facts(parent=ParentFacts(1, 1, "bash", "bash", init=False, user=SECRET)),
    "ParentFacts.program": facts(parent=ParentFacts(1, 1, "bash", "bash", init=False, program=SECRET)),
    "Owner.name": owner("user", SECRET),
    "Owner.namespace": owner("user", "x", namespace=SECRET),
    "Owner.pod": owner("user", "x", pod=SECRET),
    "Owner.container": owner("user", "x", container=SECRET),
    "Owner.slurm_job": owner("user", "x", slurm_job=SECRET),
    "Owner.unit": owner("user", "x", unit=f"{SECRET}.service"),
    "Owner.notebook": owner("user", "x", notebook=SECRET),
    "Rank.job": facts(rank=Rank(0, 2, f"{SECRET}:29500")),
    "Grant.name": reserved(f"{SECRET}/{SECRET}-0"),
    "Grant.name of a job": reserved(SECRET, kind="slurm"),
    "Grant.name of a task": reserved(f"{SECRET}/{SECRET}/5b3b", kind="nomad"),
    "Grant.devices": reserved(device=f"GPU-{SECRET}::{SECRET}"),
    "Grant.devices of old": reserved(device=f"MIG-GPU-{SECRET}/1/0"),
    "Grant.user": reserved(user=SECRET),
    "Grant.account": reserved(account=SECRET),
    "Grant.place": reserved(place=f"{SECRET}.worker.scope"),
    "Scheduler.managed": Reading(1.0, 1.0, schedulers=(Scheduler("kubelet", (f"MIG-{SECRET}",), ()),)),
    "PodLabels.namespace": Reading(1.0, 1.0, pods=(PodLabels(SECRET, "p", ()),)),
    "PodLabels.pod": Reading(1.0, 1.0, pods=(PodLabels("n", SECRET, ()),)),
    "PodLabels.labels": Reading(1.0, 1.0, pods=(PodLabels("n", "p", ((f"{SECRET}/team", SECRET),)),)),
    "HiddenHolder.command": hidden(SECRET, None),
    "HiddenHolder.user": hidden("python", SECRET),
}
"""For every field with a user's text: a reading that shows this text unless it is masked."""

HARMLESS = set(
    "Reading.driver_version Reading.cuda_version Reading.unseen Reading.collectors"
    " DeviceReading.name DeviceReading.pci_bus_id DeviceReading.mig_profile DeviceReading.error"
    " DeviceReading.mig_placement DeviceReading.memory_kind DeviceReading.addressing_mode"
    " DeviceReading.virtualization DeviceReading.confidential"
    " DeviceReading.utilization DeviceReading.activity DeviceReading.hardware DeviceReading.failed"
    " DeviceReading.words"
    " ProcessEntry.kinds"
    " ProcessRow.state"
    " ProcessFacts.ignores ProcessFacts.signs ParentFacts.signs ProcessFacts.libraries ProcessFacts.denied"
    " Owner.type Grant.type Scheduler.name HiddenHolder.kind DriverWait.channel".split()
)
"""Fields whose text is the driver's, the kernel's or one of our own words, never a user's."""


def _holds_text(hint: object) -> bool:
    if isinstance(hint, type) and issubclass(hint, str):
        return True
    return any(_holds_text(each) for each in get_args(hint))


def test_every_text_is_masked_or_known_to_be_harmless() -> None:
    """A new text field of a reading needs an entry here that says what the mask does with it."""
    found = set()
    for kind in vars(reading).values():
        if isinstance(kind, type) and kind.__module__ == reading.__name__:
            hints: Mapping[str, object] = get_type_hints(kind)
            found |= {f"{kind.__name__}.{name}" for name, hint in hints.items() if _holds_text(hint)}
    assert found == {name.partition(" ")[0] for name in MASKED} | HARMLESS
    assert not MASKED.keys() & HARMLESS


@pytest.mark.parametrize("name", MASKED)
def test_nothing_of_a_telling_field_is_left(name: str) -> None:
    """No part of a user's text is in a masked recording."""
    assert SECRET in encode(MASKED[name]).decode()
    assert SECRET not in encode(Mask().mask_reading(MASKED[name])).decode()


@pytest.mark.parametrize(
    ("real", "expected"),
    [
        ("bash acme-db", "bash"), ("node customer-x", "node"), ("sshd: alice@pts/0", "sshd"),
        ("tmux: server", "tmux"), ("python3.11 -c", "python3.11 -c"), ("pt_main_thread", "pt_main_thread"),
        ("pt_data_worker", "pt_data_worker"), ("pt_acme", "program-1"), ("acme.py", "program-1.py"),
    ],
)  # fmt: skip
def test_of_a_program_only_the_common_name_is_kept(real: str, expected: str) -> None:
    """The text after a common program name is a user's text."""
    (masked,) = Mask().mask_reading(facts(comm=real[:15], command=real)).facts
    assert (masked.comm, masked.command) == (expected[:15], expected)


@pytest.mark.parametrize(
    ("real", "expected"),
    [
        ("/user.slice/user-4711.slice/user@4711.service/app.slice/acme.service",
         "/user.slice/user-1001.slice/user@1001.service/app.slice/cgroup-1.service"),
        ("/user.slice/user-4711.slice/session-93.scope", "/user.slice/user-1001.slice/session-1.scope"),
        ("/slurm/uid_4711/job_99812/step_0/task_1", "/slurm/uid_1001/job_1/step_0/task_1"),
        ("/slurm_acme/uid_4711/job_99812/step_batch", "/slurm_node-1/uid_1001/job_1/step_batch"),
        ("/system.slice/acme_slurmstepd.scope/s5K1KKYAYG5D00/step_acme",
         "/system.slice/node-1_slurmstepd.scope/s0000000000001/cgroup-1"),
        (f"/system.slice/docker-{ID}.scope", f"/system.slice/docker-{1:064x}.scope"),
        (f"/system.slice/acme-corp-{ID[:32]}.service", "/system.slice/cgroup-1.service"),
        (f"/{POD}.payroll-training.scope", "/cgroup-1.scope"),
        (f"/machine.slice/libpod-conmon-{ID}.scope", f"/machine.slice/libpod-conmon-{1:064x}.scope"),
        (("/kubepods.slice/kubepods-acme.slice"
         f"/kubepods-burstable-pod{POD.replace('-', '_')}.slice:crio:{ID}"),
         ("/kubepods.slice/cgroup-1.slice"
         f"/kubepods-burstable-pod00000000_0000_4000_8000_000000000001.slice:crio:{1:064x}")),
        ("/lxc.payload.acme (deleted)", "/lxc.payload.container-1 (deleted)"),
        ("/system.slice/systemd-nspawn@acme.service", "/system.slice/systemd-nspawn@container-1.service"),
    ],
)  # fmt: skip
def test_of_a_cgroup_only_its_shape_is_kept(real: str, expected: str) -> None:
    """Numbers and ids are replaced, and the text around them stays only if it is known."""
    (masked,) = Mask().mask_reading(facts(cgroup=(f"0::{real}",))).facts
    assert masked.cgroup == (f"0::{expected}",)


@pytest.mark.parametrize(
    "path",
    [
        "/user.slice/user-4711.slice/user@4711.service/app.slice/acme.service",
        "/system.slice/acme_slurmstepd.scope/job_99812/step_3/user/task_0",
        f"/kubepods.slice/kubepods-pod{POD.replace('-', '_')}.slice/cri-containerd-{ID}.scope",
    ],
)
def test_owners_are_told_from_a_masked_path_as_from_the_real_one(path: str) -> None:
    """The masked path leads to an owner of the same kind, and to no real one."""
    (masked,) = Mask().mask_reading(facts(cgroup=(f"0::{path}",))).facts
    real, shown = parse_cgroup((f"0::{path}",)), parse_cgroup(masked.cgroup or ())
    assert [bool(each) for each in real] == [bool(each) for each in shown]
    assert [each.runtime for each in real.containers] == [each.runtime for each in shown.containers]


def test_user_and_job_numbers_agree_throughout() -> None:
    """A number has one replacement in facts, cgroups and owners; a failure keeps its reason alone."""
    cgroup = ("0::/user.slice/user-4712.slice", "1:cpu:/slurm/uid_4711/job_99812")
    job = Owner("slurm", "99812", slurm_job="99812")
    (masked,) = Mask().mask_reading(facts(uid=4711, user="4711", cgroup=cgroup, owner=job)).facts
    assert (masked.uid, masked.user) == (1001, "1001")
    assert masked.cgroup == ("0::/user.slice/user-1002.slice", "1:cpu:/slurm/uid_1001/job_1")
    assert masked.owner == Owner("slurm", "1", slurm_job="1")
    assert sure(Mask().mask_reading(MASKED["Reading.failure"]).failure)[0] == "sampler-exit"
    owned = [Owner("pod", "ml/train-0", "ml", "train-0"), Owner("user", "ada")]
    both = tuple(ProcessFacts(pid, pid, user="ada", owner=each) for pid, each in enumerate(owned, 1))
    pod, person = (sure(each.owner) for each in Mask().mask_reading(Reading(1.0, 1.0, facts=both)).facts)
    assert (pod.name, person.name) == (f"{pod.namespace}/{pod.pod}", "user-1")
