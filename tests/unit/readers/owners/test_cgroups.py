"""Where a process belongs by its cgroup lines: real ones of every runtime, and hostile ones."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from vramledger.readers.owners.cgroups import CgroupPlace, ContainerMark, parse_cgroup
from vramledger.slurm.names import SlurmMark

A = "e58a24d4a722c99712cff74ef69d93311089584eb32617b3890e0dcb996133f1"
B = "5eed917563583925ffdbd40a64efb2aaffe58638e57add8becaf460fe74f5b1c"
UID = "a5c1f8d5-1919-434d-add7-4afaafdaef89"
SLICE = UID.replace("-", "_")
JOB = "system.slice/slurmstepd.scope/job_9/step_0/user/task_0"


@dataclass(frozen=True)
class Case:
    """Lines as in a host's /proc, and their meaning; ``path`` is not compared."""

    source: str
    lines: tuple[str, ...]
    place: CgroupPlace


def case(source: str, *lines: str, by: tuple[str, str] | None = None, **place: object) -> Case:
    """Make a case: lines, the runtime and id of the container that they tell of, and the rest."""
    containers = () if by is None else (ContainerMark(*by),)
    return Case(source, lines, CgroupPlace(containers=containers, **place))  # type: ignore[arg-type]


CASES = [
    # --- Kubernetes ---
    case("k3s and colima, containerd, cgroup v2, systemd driver (cryptnono#47)",
        f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{A}.scope",
        pod_uid=UID, by=("containerd", A)),
    case("CRI-O, cgroup v1, systemd driver; one hierarchy at the root (runc#4620)",
        f"13:freezer:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/crio-{B}.scope",
        "11:files:/",
        f"1:name=systemd:/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SLICE}.slice/crio-{B}.scope",
        pod_uid=UID, by=("cri-o", B)),
    case("CRI-O with crun, cgroup v2: the processes are one level below",
        f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/crio-{B}.scope/container", pod_uid=UID,
        by=("cri-o", B)),
    case("cri-dockerd, cgroup v1, systemd driver; a UID of version 1 (pharos-cluster#440)",
        "4:memory:/kubepods.slice/kubepods-besteffort.slice/"
        f"kubepods-besteffort-pod9692aa0e_748e_11e8_8dfa_76d458035df6.slice/docker-{A}.scope",
        pod_uid="9692aa0e-748e-11e8-8dfa-76d458035df6", by=("docker", A)),
    case("cgroupfs driver, cgroup v1: bare UID and id, the runtime is not told",
        f"11:devices:/kubepods/burstable/pod{UID}/{A}", f"1:name=systemd:/kubepods/burstable/pod{UID}/{A}",
        pod_uid=UID, by=("", A)),
    case("cgroupfs driver, a guaranteed pod, cgroup v2", f"0::/kubepods/pod{UID}/{A}", pod_uid=UID,
        by=("", A)),
    case("a static pod: its UID is a hash without dashes (netdata#4868)",
        "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod8daa50c3a64c9ff60bb9eab7b44b56fd.slice/"
        f"cri-containerd-{A}.scope", pod_uid="8daa50c3a64c9ff60bb9eab7b44b56fd", by=("containerd", A)),
    case("containerd not told about the kubelet's systemd driver, cgroup v1",
        f"12:cpu,cpuacct:/system.slice/containerd.service/kubepods-besteffort-pod{SLICE}.slice:cri-containerd:{A}",
        pod_uid=UID, by=("containerd", A)),
    case("kind's kubelet, as its node shows it, cgroup v2 (containerd/nri#227)",
        "0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
        f"kubelet-kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{A}.scope", pod_uid=UID,
        by=("containerd", A)),
    case("the same pod seen from the host: kind's node is a Docker container, systemd driver",
        f"0::/system.slice/docker-{B}.scope/kubelet.slice/kubelet-kubepods.slice/"
        f"kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{A}.scope",
        by=("docker", B)),
    case("minikube with CRI-O in Docker, cgroupfs outside (minikube#11280)",
        f"0::/docker/{A}/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SLICE}.slice/crio-{B}.scope",
        by=("docker", A)),
    case("another pod, seen from a pod with a cgroup namespace of its own",
        f"0::/../../kubepods-besteffort-pod{SLICE}.slice/cri-containerd-{A}.scope", pod_uid=UID,
        by=("containerd", A)),
    case("the same with the cgroupfs driver", f"4:memory:/../../pod{UID}/{A}", pod_uid=UID, by=("", A)),
    case("Docker in a pod (a CI runner): the pod's container around the runner's",
        f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{A}.scope/docker/{B}", pod_uid=UID,
        by=("containerd", A)),
    # --- containers ---
    case("Docker, cgroup v1, cgroupfs driver", f"12:pids:/docker/{A}", f"1:name=systemd:/docker/{A}",
        "0::/system.slice/containerd.service", by=("docker", A)),
    case("Docker, cgroup v2, systemd driver", f"0::/system.slice/docker-{A}.scope", by=("docker", A)),
    case("Docker with --cgroup-parent, as GitHub's runner does", f"0::/actions_job/{A}", by=("", A)),
    case("rootless Docker, cgroup v2",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{A}.scope",
        unit="user@1000.service", user_manager=1000),
    case("Podman as root, cgroup v2, systemd", f"0::/machine.slice/libpod-{A}.scope/container",
        by=("podman", A)),
    case("Podman 4.3 as root, cgroup v1 and v2 together, cgroupfs: Debian 12, run by test_owners_real.py",
        f"9:name=systemd:/libpod_parent/libpod-{A}", f"4:memory:/libpod_parent/libpod-{A}",
        f"0::/libpod_parent/libpod-{A}", by=("podman", A)),
    case("rootless Podman, cgroup v2",
        f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope/container",
        unit="user@1000.service", user_manager=1000),
    case("Podman by a quadlet: the container is part of the service",
        f"0::/system.slice/ollama.service/libpod-payload-{A}", by=("podman", A), unit="ollama.service"),
    case("Podman's own pod, which is none of Kubernetes' (podman#6400)",
        f"0::/user.slice/user-libpod_pod_{B}.slice/libpod-{A}.scope/container", by=("podman", A)),
    case("nerdctl, cgroup v2, systemd", f"0::/system.slice/nerdctl-{A}.scope", by=("nerdctl", A)),
    case("LXC 4, cgroup v2, with systemd inside", "0::/lxc.payload.gpubox/system.slice/ollama.service",
        by=("lxc", "gpubox")),
    case("LXC 3, cgroup v1", "3:devices:/lxc/gpubox/init.scope", by=("lxc", "gpubox")),
    case("Podman's monitor, which is in no container", f"0::/machine.slice/libpod-conmon-{A}.scope",
        unit=f"libpod-conmon-{A}.scope"),
    # --- Slurm ---
    case("Slurm, cgroup v1; systemd's hierarchy knows slurmd alone",
        "11:freezer:/slurm/uid_2101171/job_280678/step_interactive",
        "10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0", "3:cpu,cpuacct:/slurm",
        "1:name=systemd:/system.slice/slurmd.service", slurm=SlurmMark("280678", "interactive", 2101171),
        unit="slurmd.service"),
    case("Slurm with several slurmd on a node, cgroup v1 (plazonic/cgroup_exporter PR 5)",
        "10:memory:/slurm_node-a1/uid_1000/job_17/step_batch/task_0", slurm=SlurmMark("17", "batch", 1000)),
    case("Slurm 24, cgroup v2 (NordicHPC/sonar)",
        "0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0", slurm=SlurmMark("1392969", "0")),
    case("Slurm of Debian and Ubuntu, cgroup v2 (treydock/cgroup_exporter#30)",
        "0::/system.slice/gpu-n12_slurmstepd.scope/job_101/step_batch/user/task_special",
        slurm=SlurmMark("101", "batch")),
    case("Slurm 26.05, cgroup v2: a SLUID in place of the number (slurm-job-exporter#66)",
        "0::/system.slice/slurmstepd.scope/s5K1KKYAYG5D00/step_0/user/task_0",
        slurm=SlurmMark("s5K1KKYAYG5D00", "0")),
    case("a container of Podman in a Slurm job",
        f"0::/system.slice/slurmstepd.scope/job_9/step_0/user/task_0/libpod-{A}", slurm=SlurmMark("9", "0"),
        by=("podman", A)),
    case("slurmd in a pod", f"0::/kubepods.slice/kubepods-pod{SLICE}.slice/cri-containerd-{A}.scope/"
        "system.slice/slurmstepd.scope/job_9/step_0/user/task_0", pod_uid=UID, by=("containerd", A)),
    # --- systemd ---
    case("a system service, cgroup v2", "0::/system.slice/ollama.service", unit="ollama.service"),
    case("an instance of a service in a slice of its own, cgroup v1", "8:memory:/system.slice",
        r"1:name=systemd:/system.slice/system-vllm\x2dserve.slice/vllm-serve@llama.service",
        unit="vllm-serve@llama.service"),
    case("a user service", "0::/user.slice/user-1000.slice/user@1000.service/app.slice/train.service",
        unit="train.service", user_manager=1000),
    case("systemd-run --scope", "0::/system.slice/run-r2f0d9a1c3b5e4f6a8c7d.scope",
        unit="run-r2f0d9a1c3b5e4f6a8c7d.scope"),
    case("a login over ssh", "0::/user.slice/user-1000.slice/session-5.scope", unit="session-5.scope"),
    case("no systemd, cgroup v1", "4:memory:/", "1:cpu:/", "0::/"),
    # --- names that a user may write below the user's own manager are ignored ---
    case("a forged pod", f"0::/user.slice/user-1000.slice/user@1000.service/app.slice/kubepods/pod{UID}/{A}",
        unit="user@1000.service", user_manager=1000),
    case("a forged Slurm job", "0::/user.slice/user-1000.slice/user@1000.service/slurm/uid_0/job_1/step_0",
        unit="user@1000.service", user_manager=1000),
    case("a directory that is called like a job", "0::/job_17/step_0"),
    case("a directory that is called slurm", "0::/slurm/job_17"),
]  # fmt: skip


@pytest.mark.parametrize("each", CASES, ids=lambda each: each.source)
def test_the_lines_of(each: Case) -> None:
    """The lines of a real host give its pod, containers, job and unit."""
    assert parse_cgroup(each.lines)._replace(path="") == each.place


def test_the_order_of_the_lines_does_not_matter() -> None:
    """The kernel may number its hierarchies in any order."""
    for each in CASES:
        assert parse_cgroup(reversed(each.lines)) == parse_cgroup(each.lines)


WORDS = """/ .. : :: pod kubepods kubepods.slice docker slurm uid_1 job_1 step_0 slurmstepd.scope
user@1.service .scope lxc lxc.payload. a.service ../../etc/passwd 1:name=systemd:/ 0::/"""
HOSTILE = " (deleted)", "\n", "\0", '"', "\\", "\ufffd", A, UID, SLICE, "x" * 65536
PIECES = st.sampled_from([*WORDS.split(), *HOSTILE])
LINES = st.lists(st.lists(PIECES | st.text(max_size=20), max_size=12).map("".join), max_size=6)


@settings(max_examples=examples(500))
@given(LINES)
def test_hostile_lines_never_raise(lines: list[str]) -> None:
    """For every text in a cgroup file, the result is short, printable and not a path."""
    place = parse_cgroup(lines)
    for name in (place.pod_uid, place.unit, *(each.id for each in place.containers)):
        assert len(name) <= 255
        assert name.isprintable()
        assert "/" not in name


@settings(max_examples=examples(500))
@given(st.lists(PIECES | st.text(max_size=20), max_size=12))
def test_nothing_below_a_users_manager_is_a_pod_or_a_job(segments: list[str]) -> None:
    """A user chooses names below the own systemd manager, and cannot claim another's pod or job."""
    path = "/".join(segment.replace("/", "").replace("\n", "") for segment in segments)
    place = parse_cgroup([f"0::/user.slice/user-1000.slice/user@1000.service/{path}"])
    assert place.user_manager == 1000
    assert (place.pod_uid, place.slurm, place.containers) == ("", None, ())


@settings(max_examples=examples(500))
@given(st.lists(PIECES | st.text(max_size=20), max_size=12))
def test_nothing_below_a_container_is_a_fact(segments: list[str]) -> None:
    """A container's root chooses names below it: they change neither its owner nor anybody else's."""
    path = "/".join(segment.replace("/", "").replace("\n", "") for segment in segments)
    place = parse_cgroup([f"0::/system.slice/docker-{A}.scope/{path}"])
    assert place._replace(path="") == CgroupPlace(containers=(ContainerMark("docker", A),))


def test_in_our_own_container_names_are_our_own_roots() -> None:
    """Where slurmd is in a container, who is in the same one sees its jobs; in another one there are none."""
    ours, other = (ContainerMark("docker", A),), (ContainerMark("docker", B),)
    path = f"0::/system.slice/docker-{A}.scope/{JOB}/libpod-{B}"
    assert parse_cgroup([path], ours).slurm == SlurmMark("9", "0")
    assert parse_cgroup([path], ours).containers == (*ours, ContainerMark("podman", B))
    assert parse_cgroup([path], other) == parse_cgroup([path])
    assert parse_cgroup([path]).slurm is None


@pytest.mark.parametrize("below", [f"docker-{B}.scope", f"kubepods/pod{UID}/{A}", JOB, "user@1001.service"])
def test_nothing_below_a_delegated_unit_is_a_fact(below: str) -> None:
    """Whose cgroup it is names what is below it: no pod, job, container or manager of another user."""
    unit = "/system.slice/lab.service"
    place = parse_cgroup([f"0::{unit}/a/{below}"], users_own=lambda _, path: path == unit)
    assert place._replace(path="") == CgroupPlace(unit="lab.service")
    assert parse_cgroup([f"0::{unit}/a/{below}"])._replace(path="") != CgroupPlace(unit="lab.service")
