"""Names and order of owners, on host directories as the kubelet, Docker and Podman leave them."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.support.procs import FakeProc, known, proc
from tests.support.sure import sure
from vramledger.model.reading import Owner, ProcessFacts
from vramledger.readers.hosts.host import Host
from vramledger.readers.hosts.program_names import find_notebook
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.reader import LOOK_AGAIN, UnitUsers, resolve_from_facts, resolve_owner

A = "e58a24d4a722c99712cff74ef69d93311089584eb32617b3890e0dcb996133f1"
B = "5eed917563583925ffdbd40a64efb2aaffe58638e57add8becaf460fe74f5b1c"
UID = "a5c1f8d5-1919-434d-add7-4afaafdaef89"
KUBELET = f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-{A}.scope"
MANAGER = "/user.slice/user-1000.slice/user@1000.service"
NOTEBOOK = "/home/ada/work/gan.ipynb"
ID = "0f3a9d52-7c11-4b6e-9a55-1d2c3b4a5f60"
TRAIN = Owner("pod", "ml/train-0", namespace="ml", pod="train-0", container="main")


def facts(*paths: str, user: str | None = "ada", claims: str = "") -> ProcessFacts:
    """Make the facts of a process in these cgroups."""
    owner = Owner("user", user or "", notebook=claims) if claims else None
    return ProcessFacts(42, 7, uid=1000, user=user, cgroup=tuple(f"0::{each}" for each in paths), owner=owner)


def pod(root: Path, *containers: str) -> None:
    """Make the kubelet's directories for the pod; the last of its containers has a log."""
    for container in containers:
        (root / f"var/log/pods/ml_train-0_{UID}/{container}").mkdir(parents=True)
    (root / "var/log/containers").mkdir()
    (root / f"var/log/containers/train-0_ml_{containers[-1]}-{A}.log").symlink_to("/nowhere")


def docker(root: Path, container: str, name: object) -> None:
    """Make Docker's file for a container, with an environment that must not be shown."""
    place = root / f"var/lib/docker/containers/{container}"
    place.mkdir(parents=True)
    (place / "config.v2.json").write_text(json.dumps({"Name": name, "Config": {"Env": ["HF_TOKEN=secret"]}}))


def podman(root: Path, listed: object) -> None:
    """Make Podman's list of containers."""
    place = root / "var/lib/containers/storage/overlay-containers"
    place.mkdir(parents=True)
    (place / "containers.json").write_text(json.dumps(listed))


def answer(root: Path, known: ProcessFacts) -> Owner | None:
    """Resolve the owner with a host's files."""
    return resolve_owner(HostFiles(root), known).owner


def test_a_pod_has_the_kubelets_names(tmp_path: Path) -> None:
    """Namespace, pod and container come from the kubelet's directories, with no API and no link followed."""
    pod(tmp_path, "sidecar", "main")
    assert answer(tmp_path, facts(KUBELET)) == TRAIN


def test_a_pod_without_the_second_directory_names_its_only_container(tmp_path: Path) -> None:
    """If the ids of containers are not known, a single container is chosen, and of several none."""
    for name in ("main", "sidecar"):
        (tmp_path / f"var/log/pods/ml_train-0_{UID}/{name}").mkdir(parents=True)
        assert sure(answer(tmp_path, facts(KUBELET))).container == ("main" if name == "main" else A[:12])


def test_a_pod_without_names_is_its_uid(tmp_path: Path) -> None:
    """A host without the kubelet's directories gives ids, without an error, and is read again."""
    found = resolve_owner(HostFiles(tmp_path), facts(KUBELET))
    assert found.owner == Owner("pod", UID, pod=UID, container=A[:12])
    assert not found.complete


def test_a_pod_of_docker_is_named_by_its_container(tmp_path: Path) -> None:
    """The name that the kubelet gives to its containers in Docker names the pod if nothing else does."""
    docker(tmp_path, A, f"/k8s_main_train-0_ml_{UID}_0")
    assert answer(tmp_path, facts(f"/kubepods/burstable/pod{UID}/{A}")) == TRAIN


def test_docker_in_a_pod_is_the_pods(tmp_path: Path) -> None:
    """The pod is the owner, and the container is the innermost that this host has a name for."""
    pod(tmp_path, "dind")
    assert answer(tmp_path, facts(f"{KUBELET}/docker/{B}")) == TRAIN._replace(container="dind")


@pytest.mark.parametrize(
    ("name", "shown"),
    [("/ollama", "ollama"), ("/a/b", A[:12]), ("", A[:12]), (None, A[:12]), (7, A[:12]), ("/x\n", A[:12])],
)
def test_docker_containers_have_dockers_name(tmp_path: Path, name: object, shown: str) -> None:
    """A container has the name that Docker wrote; an invalid name leaves the short id."""
    docker(tmp_path, A, name)
    found = answer(tmp_path, facts(f"/system.slice/docker-{A}.scope"))
    assert found == Owner("container", shown, container=shown)


def test_podman_containers_have_podmans_name(tmp_path: Path) -> None:
    """A container of root's Podman has the name in its list."""
    podman(tmp_path, ["?", {"id": B, "names": ["other"]}, {"id": A, "names": ["comfy"]}])
    found = answer(tmp_path, facts(f"/machine.slice/libpod-{A}.scope/container"))
    assert found == Owner("container", "comfy", container="comfy")


def test_nerdctl_containers_have_nerdctls_name(tmp_path: Path) -> None:
    """A container of plain containerd has the name of the file that nerdctl keeps for it."""
    names = tmp_path / "var/lib/nerdctl/1935db59/names/default"
    names.mkdir(parents=True)
    (names / "other").write_text(B)
    (names / "trainer").write_text(A)
    found = answer(tmp_path, facts(f"/system.slice/nerdctl-{A}.scope"))
    assert found == Owner("container", "trainer", container="trainer")


@pytest.mark.parametrize("content", ["", "{", "[[]]", "{}", "null", "[" * 100_000, '[{"id":1,"names":{}}]'])
def test_broken_runtime_files_cost_the_name_only(tmp_path: Path, content: str) -> None:
    """With any content of a runtime's file, the short id remains."""
    podman(tmp_path, None)
    (tmp_path / "var/lib/containers/storage/overlay-containers/containers.json").write_text(content)
    found = answer(tmp_path, facts(f"/machine.slice/libpod-{A}.scope"))
    assert found == Owner("container", A[:12], container=A[:12])


def test_rootless_containers_are_not_looked_for_among_roots(tmp_path: Path) -> None:
    """A user's cgroup with the name of root's container does not get that container's name."""
    podman(tmp_path, [{"id": A, "names": ["production"]}])
    found = answer(tmp_path, facts(f"{MANAGER}/user.slice/libpod-{A}.scope"))
    assert found == Owner("user", "ada", unit="user@1000.service")


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        (f"{KUBELET}/system.slice/slurmstepd.scope/job_9/step_0/user", "pod", "ml/train-0"),
        ("/system.slice/slurmstepd.scope/job_9/step_0/user", "slurm", "9"),
        (f"/system.slice/slurmstepd.scope/job_9/step_0/libpod-{A}", "slurm", "9"),
        (KUBELET, "pod", "ml/train-0"),
        (f"/system.slice/docker-{A}.scope", "container", A[:12]),
        ("/system.slice/jupyter.service", "unit", "jupyter.service"),
        ("/user.slice/user-1000.slice/session-5.scope", "user", "ada"),
        ("/", "user", "ada"),
    ],
)
def test_a_notebook_keeps_its_label_and_owner(tmp_path: Path, path: str, kind: str, name: str) -> None:
    """The program itself says that it is a notebook, so whatever the kernel attests is the owner."""
    pod(tmp_path, "main")
    found = sure(answer(tmp_path, facts(path, claims=NOTEBOOK)))
    assert (found.type, found.name, found.notebook) == (kind, name, NOTEBOOK)


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("/system.slice/ollama.service", "unit", "ollama.service"),
        (f"{MANAGER}/app.slice/train.service", "user", "ada"),
        ("/system.slice/run-r2f.scope", "unit", "run-r2f.scope"),
        ("/user.slice/user-1000.slice/session-5.scope", "user", "ada"),
        (f"{MANAGER}/init.scope", "user", "ada"),
        (f"{MANAGER}/tmux-spawn-0f.scope", "user", "ada"),
        (f"{MANAGER}/app.slice/app-org.gnome.Terminal.slice/vte-spawn-1.scope", "user", "ada"),
        ("/system.slice/ssh.service", "user", "ada"),
        ("/system.slice/cron.service", "user", "ada"),
        ("/", "user", "ada"),
    ],
)
def test_a_unit_that_says_more_than_the_user_answers(tmp_path: Path, path: str, kind: str, name: str) -> None:
    """A service is an owner; for a login, a terminal, sshd and cron the owner is the user."""
    found = sure(answer(tmp_path, facts(path)))
    assert (found.type, found.name) == (kind, name)


def test_who_is_nobody_has_no_owner(tmp_path: Path) -> None:
    """Where not even the user is known, there is no owner."""
    assert answer(tmp_path, ProcessFacts(42, 7)) is None
    assert resolve_from_facts(ProcessFacts(42, 7)).owner is None


@pytest.mark.parametrize("link", ["var/log/pods", "var/log", "var"])
def test_links_are_not_followed(tmp_path: Path, link: str) -> None:
    """A link in the place of an expected directory, or above it, is not followed."""
    elsewhere = tmp_path / "elsewhere"
    pod(elsewhere, "main")
    host = tmp_path / "host"
    (host / link).parent.mkdir(parents=True, exist_ok=True)
    (host / link).symlink_to(elsewhere / link)
    assert answer(host, facts(KUBELET)) == Owner("pod", UID, pod=UID, container=A[:12])


@pytest.mark.parametrize("kind", ["link", "fifo", "directory", "huge"])
def test_only_plain_files_of_a_sane_size_are_read(tmp_path: Path, kind: str) -> None:
    """A link, a pipe, a directory and a file of gigabytes in place of Docker's file are ignored."""
    docker(tmp_path, A, "/mine")
    config = tmp_path / f"var/lib/docker/containers/{A}/config.v2.json"
    if kind == "huge":
        os.truncate(config, 2**33)
    else:
        aside = config.rename(config.with_name("aside"))
        if kind == "link":
            config.symlink_to(aside)
        elif kind == "fifo":
            os.mkfifo(config)
        else:
            config.mkdir()
    found = answer(tmp_path, facts(f"/system.slice/docker-{A}.scope"))
    assert found == Owner("container", A[:12], container=A[:12])


@pytest.mark.parametrize("path", ["..", "a/../b", "/", "a//b", ".", "", "a\0b"])
def test_a_path_cannot_leave_the_tree(tmp_path: Path, path: str) -> None:
    """Tricks in a path give nothing, and raise nothing."""
    (tmp_path / "a").mkdir()
    tree = HostFiles(tmp_path)
    assert tree.list_names(path) is None
    assert tree.has_directory(path) is None
    assert tree.read(f"{path}/x", 100) is None


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=60)
FOLDERS = NAMES.map(lambda name: f"{name}_{UID}") | st.builds("{}_{}_{}".format, NAMES, NAMES, st.just(UID))


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(FOLDERS, max_size=4))
def test_hostile_names_are_no_labels(tmp_path_factory: pytest.TempPathFactory, names: list[str]) -> None:
    """A name that Kubernetes does not allow is ignored: the pod keeps its UID or a valid name."""
    root = tmp_path_factory.mktemp("host")
    for name in names:
        try:
            (root / f"var/log/pods/{name}").mkdir(parents=True, exist_ok=True)
        except (OSError, UnicodeEncodeError):
            continue
    found = sure(answer(root, facts(KUBELET)))
    assert all(letter in "abcdefghijklmnopqrstuvwxyz0123456789-./" for letter in found.name)


@pytest.mark.parametrize(
    ("argv", "variable", "name"),
    [
        (f"python -m ipykernel_launcher -f /run/user/1000/jupyter/kernel-{ID}.json", NOTEBOOK, NOTEBOOK),
        (f"python -m ipykernel_launcher -f /run/user/1000/jupyter/kernel-{ID}.json", None, f"kernel-{ID}"),
        (f"python -m ipykernel_launcher --f=/home/ada/.local/share/jupyter/runtime/kernel-v3{ID}.json", None,
         f"kernel-v3{ID}"),
        (f"python -m ipykernel_launcher -f kernel-{ID}.json", "/home/ada/", f"kernel-{ID}"),
        ('python -m ipykernel_launcher --f="/a\N{NO-BREAK SPACE}b/kernel-v3a0f.json"', None, "kernel-v3a0f"),
        ("python -m ipykernel_launcher --f=/tmp/tmp-52030HdOn7IrfdSaA.json", None, "tmp-52030HdOn7IrfdSaA"),
        ("python -m ipykernel_launcher -f /tmp/tmpq3x_8k1a.json", None, "tmpq3x_8k1a"),
        ("python -m ipykernel_launcher --HistoryManager.enabled=False -f /tmp/tmpa.json", None, "tmpa"),
        (f"python3 -m colab_kernel_launcher -f /r/kernel-{ID}.json", None, f"kernel-{ID}"),
        ("python /databricks/scripts/db_ipykernel_launcher.py -f /d/connection.json", None, "connection"),
        (f"R --slave -e IRkernel::main() --args /r/kernel-{ID}.json", None, f"kernel-{ID}"),
        (f"julia -i /j/packages/IJulia/6TIq1/src/kernel.jl /r/kernel-{ID}.json", None, f"kernel-{ID}"),
        ("./cuda_kernel_launcher -f sizes.json", None, ""),
        ("python train.py --f=config.json ipykernel_launcher", None, ""),
        ("python -m ipykernel_launcher -f", None, ""),
        (f"python train.py -flags=kernel-{ID}.json", None, ""),
        ("python train.py", NOTEBOOK, NOTEBOOK),
        ("python train.py -f config.json", None, ""),
        (f"tail kernel-{ID}.json", None, ""),
        ("python train.py", None, ""),
        ("", None, ""),
    ],
)  # fmt: skip
def test_a_kernels_notebook(argv: str, variable: str | None, name: str) -> None:
    """Jupyter's variable gives the path, a kernel's connection file a name, anything else nothing."""
    environment = b"\0HOME=/home/ada\0NOT_JPY_SESSION_NAME=x"
    if variable is not None:
        environment += b"\0JPY_SESSION_NAME=" + variable.encode()
    assert find_notebook(argv.split(" "), environment + b"\0HF_TOKEN=secret\0") == name


@settings(max_examples=examples(500))
@given(st.lists(st.text(max_size=30) | st.just("-f"), max_size=6), st.binary(max_size=3000))
def test_hostile_environments_give_short_printable_names(argv: list[str], value: bytes) -> None:
    """A notebook's name is short and printable, and ends where its variable does."""
    name = find_notebook(argv, b"\0JPY_SESSION_NAME=" + value + b"\0HF_TOKEN=secret\0")
    assert len(name) <= 1024
    assert name.isprintable()
    assert "HF_TOKEN=secret" not in name


__all__ = ["proc"]
ANN, BOB, DAEMON = 1001, 200_000, 990
HUB = "/system.slice/jupyterhub.service"


class Service:
    """Processes in cgroups, and the owners that they have."""

    def __init__(self, proc: FakeProc) -> None:
        self.now = 0.0
        self.proc = proc
        self.host = Host(proc.root)
        self.units = UnitUsers(self.host, clock=lambda: self.now)

    def add(self, pid: int, uid: int, cgroup: str = HUB) -> ProcessFacts:
        """Start a process of a user."""
        row = self.proc.add(pid, status=b"Uid:\t%d\t%d\t%d\t%d\n" % (uid, uid, uid, uid))
        (self.proc.root / str(pid) / "cgroup").write_text(f"0::{cgroup}\n")
        return known(self.host.facts(row))

    def owner(self, facts: ProcessFacts) -> tuple[str, str, str]:
        """Return type, name and unit of a process' owner."""
        owner = sure(resolve_owner(HostFiles(self.proc.root), facts, is_shared=self.units.is_shared).owner)
        return owner.type, owner.name, owner.unit


@pytest.fixture
def service(proc: FakeProc) -> Service:
    """Return a host with an init alone."""
    return Service(proc)


@pytest.mark.parametrize("daemon", [0, DAEMON, BOB])
@pytest.mark.parametrize("below", [HUB, f"{HUB}/user-ann", "/hubs.slice/hubs-a.slice/condor.service"])
def test_a_person_is_the_owner_in_a_daemons_service(service: Service, daemon: int, below: str) -> None:
    """A daemon starts people's programs in its own service: each person owns what is theirs."""
    unit = next(part for part in below.split("/") if part.endswith(".service"))
    service.add(40, daemon, below.partition(".service")[0] + ".service")
    assert service.owner(service.add(41, ANN, below)) == ("user", str(ANN), unit)


@pytest.mark.parametrize("uids", [(ANN, ANN), (0, 0), (0, DAEMON), (0, 65534), (0, 61500), (DAEMON, DAEMON)])
def test_a_service_that_is_one_program_is_the_owner(service: Service, uids: tuple[int, int]) -> None:
    """A service of one person, and one that gives up root for a user of its own, is the owner itself."""
    service.add(40, uids[0])
    assert service.owner(service.add(41, uids[1])) == ("unit", "jupyterhub.service", "jupyterhub.service")


def test_who_is_elsewhere_does_not_count(service: Service) -> None:
    """Users of other services do not count, whatever their names have in common."""
    for pid, place in enumerate(("/", f"{HUB}d", "/system.slice", f"/user.slice/x{HUB}"), start=50):
        service.add(pid, 0, place)
    assert service.owner(service.add(41, ANN))[0] == "unit"


def test_a_second_user_is_noticed_and_not_forgotten(service: Service) -> None:
    """A service that gets a second user has several from then on, also when the first program has ended."""
    ann = service.add(41, ANN)
    assert service.owner(ann)[0] == "unit"
    bob = service.add(42, BOB)
    service.now += LOOK_AGAIN
    assert [service.owner(each)[1] for each in (ann, bob)] == [str(ANN), str(BOB)]
    service.add(42, ANN)
    service.now += LOOK_AGAIN
    assert service.owner(ann)[1] == str(ANN)


def test_the_programs_of_a_session_or_a_job_are_what_they_were(service: Service) -> None:
    """Only a service is shared: a scope is of who started it, and a container or a job goes before."""
    service.add(40, 0, "/system.slice/run-1.scope")
    assert service.owner(service.add(41, ANN, "/system.slice/run-1.scope"))[0] == "unit"
    job = "/system.slice/slurmstepd.scope/job_17/step_0"
    service.add(42, 0, job)
    assert service.owner(service.add(43, ANN, job))[:2] == ("slurm", "17")
