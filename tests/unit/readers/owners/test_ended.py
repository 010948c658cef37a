"""When an owner counts as ended, and how the reader finds names without ever waiting."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.support.sure import sure
from tests.support.waiting import wait_until
from tests.unit.readers.owners.test_reader import KUBELET as POD
from tests.unit.readers.owners.test_reader import UID, A, B, docker, facts, pod
from vramledger.model.reading import Owner, ProcessFacts, ProcessRow
from vramledger.readers.hosts.host import Host
from vramledger.readers.owners import ended, host_files, reader
from vramledger.readers.owners.host_files import HostFiles
from vramledger.readers.owners.reader import OwnerReader, resolve_owner

DOCKER = f"/system.slice/docker-{A}.scope"
STEP = "/system.slice/slurmstepd.scope/job_9/step_0"
NESTED = f"/system.slice/docker-{B}.scope{POD}"
TASKS = "run/containerd/io.containerd.runtime.v2.task"
MARKS = {
    "pod": (POD, f"var/lib/kubelet/pods/{UID}"),
    "Docker": (DOCKER, f"{TASKS}/moby/{A}"),
    "Podman": (f"/machine.slice/libpod-{A}.scope/container", f"run/crun/{A}"),
    "Slurm": (f"{STEP}/user/task_0", f"sys/fs/cgroup{STEP}/slurm"),
}
NEIGHBOUR = "f" * 8 + UID[8:]


class Scene:
    """One process with an owner, on a host below a directory."""

    def __init__(self, root: Path, path: str, *, started: float = 1.0) -> None:
        self.root = root
        known = facts(path)
        found = resolve_owner(HostFiles(root), known)
        watched = sure(ended.watch_process(found.place, known.cgroup or (), found.owner, started=started))
        self.now = known.cgroup
        self._processes = {42: watched}

    def join(self, other: Scene) -> None:
        """Check another process, too."""
        self._processes[43] = other._processes[42]

    def look(self) -> str | None:
        """Check once."""
        return ended.check_owners(HostFiles(self.root), self._processes, lambda _: self.now).get(42)


@pytest.mark.parametrize("runtime", MARKS)
def test_a_mark_that_was_there_and_is_gone_ends_the_owner(tmp_path: Path, runtime: str) -> None:
    """Two looks in a row that miss a mark seen before are evidence; the mark's return ends the evidence."""
    path, mark = MARKS[runtime]
    (tmp_path / mark).mkdir(parents=True)
    scene = Scene(tmp_path, path)
    assert scene.look() is None
    (tmp_path / mark).rmdir()
    assert scene.look() is None
    why = sure(scene.look())
    assert why.startswith("its ")
    assert " has ended: " in why
    (tmp_path / mark).mkdir()
    assert scene.look() is None


def neighbour_of(tmp_path: Path, path: str, mark: str) -> Scene:
    """Put a neighbour of the same kind beside a process, with its mark in the same directory."""
    other = path.replace(A, B).replace(UID.replace("-", "_"), NEIGHBOUR.replace("-", "_"))
    (tmp_path / mark.replace(A, B).replace(UID, NEIGHBOUR).replace("step_0", "step_1")).mkdir(parents=True)
    return Scene(tmp_path, other)


NEVER_SEEN = {
    **{name: mark for name, mark in MARKS.items() if name != "pod"},
    "nerdctl": (f"/system.slice/nerdctl-{A}.scope", f"{TASKS}/default/{A}"),
    "Kubernetes": (f"/kubepods/burstable/pod{UID}/cri-containerd-{A}.scope", f"{TASKS}/k8s.io/{A}"),
    "CRI-O": (f"/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/crio-{A}.scope", f"run/crun/{A}"),
}


@pytest.mark.parametrize("runtime", NEVER_SEEN)
def test_a_neighbours_mark_does_not_end_a_container(tmp_path: Path, runtime: str) -> None:
    """Another namespace or root of the same runtime has its marks elsewhere: its containers are running."""
    path, mark = NEVER_SEEN[runtime]
    scene = Scene(tmp_path, path)
    scene.join(neighbour_of(tmp_path, path, mark))
    assert [scene.look() for _ in range(3)] == [None, None, None]


@pytest.mark.parametrize(
    ("path", "neighbour", "started", "ends"),
    [
        (POD, POD, 1.0, True),
        (POD, POD, 4e9, False),  # the directory has not changed since: another kubelet may have taken over
        (POD, f"/kubelet.slice{POD}", 1.0, False),  # another kubelet, with a directory of its own
        (f"/pod{UID}/{A}", f"/pod{UID}/{A}", 1.0, False),  # whose pod it is, is not known
    ],
)
def test_a_pod_ended_before_us(tmp_path: Path, path: str, neighbour: str, started: float, ends: bool) -> None:
    """A pod's mark that was never seen counts as gone where the same kubelet has its pods' marks."""
    scene = Scene(tmp_path, path, started=started)
    scene.join(neighbour_of(tmp_path, neighbour, MARKS["pod"][1]))
    assert scene.look() is None
    assert (scene.look() is not None) == ends


RECORD = {
    "Running": False, "Paused": False, "Restarting": False, "Pid": 0,
    "FinishedAt": "2026-11-22T07:00:00.123456789Z",
}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        (RECORD, True),
        ({**RECORD, "Running": True, "Pid": 42}, False),
        ({**RECORD, "Restarting": True}, False),
        ({**RECORD, "FinishedAt": "2026-11-22T05:59:59Z"}, False),  # before the process started: a copy
        ({**RECORD, "FinishedAt": "0001-01-01T00:00:00Z"}, False),
        ({**RECORD, "FinishedAt": "yesterday, Z"}, False),
        ({**RECORD, "FinishedAt": 1}, False),
        ({"Running": False}, False),
        ([], False),
    ],
)
@pytest.mark.parametrize("path", [DOCKER, f"/docker/{A}", f"/system.slice/nerdctl-{A}.scope"])
def test_what_docker_has_recorded(tmp_path: Path, path: str, state: object, ends: bool) -> None:
    """Docker's own record of an end is evidence, if its container has no mark and is Docker's."""
    config = tmp_path / f"var/lib/docker/containers/{A}/config.v2.json"
    config.parent.mkdir(parents=True)
    config.write_text(json.dumps({"Name": "/train", "State": state}))
    scene = Scene(tmp_path, path, started=1795327200.0)  # 06:00 on that day
    looks = [scene.look() for _ in range(3)]
    assert (looks[1] is not None) == (ends and "nerdctl" not in path)
    (tmp_path / MARKS["Docker"][1]).mkdir(parents=True)
    assert scene.look() is None


def test_a_mount_that_went_away_ends_nobody(tmp_path: Path) -> None:
    """A directory that is empty because it is another one now says nothing of what was in the first."""
    path, mark = MARKS["Docker"]
    (tmp_path / mark).mkdir(parents=True)
    scene = Scene(tmp_path, path)
    assert scene.look() is None
    directory = (tmp_path / mark).parent
    directory.rename(directory.with_name("unmounted"))
    directory.mkdir()
    assert [scene.look() for _ in range(3)] == [None, None, None]


def test_a_directory_that_is_too_long_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that may stand in the part that was not read is not gone."""
    path, mark = MARKS["Docker"]
    (tmp_path / mark).mkdir(parents=True)
    scene = Scene(tmp_path, path)
    assert scene.look() is None
    (tmp_path / mark).rmdir()
    (tmp_path / mark).with_name(B).mkdir()
    (tmp_path / mark).with_name("c").mkdir()
    monkeypatch.setattr(host_files, "MAX_NAMES", 1)
    assert [scene.look() for _ in range(3)] == [None, None, None]


@pytest.mark.parametrize("runtime", MARKS)
def test_a_mark_that_was_never_seen_proves_nothing(tmp_path: Path, runtime: str) -> None:
    """A runtime with other directories makes no orphans, nor does a whole directory that went away."""
    path, mark = MARKS[runtime]
    (tmp_path / mark).parent.mkdir(parents=True)
    scene = Scene(tmp_path, path)
    assert [scene.look() for _ in range(3)] == [None, None, None]
    (tmp_path / mark).mkdir()
    scene = Scene(tmp_path, path)
    assert scene.look() is None
    os.removedirs(tmp_path / mark)
    assert [scene.look() for _ in range(3)] == [None, None, None]


def test_a_nested_clusters_pods_are_not_the_hosts(tmp_path: Path) -> None:
    """The host's kubelet knows nothing of a pod in kind, even if a directory once had such a name."""
    mark = tmp_path / f"var/lib/kubelet/pods/{UID}"
    mark.mkdir(parents=True)
    scene = Scene(tmp_path, NESTED)
    assert scene.look() is None
    mark.rmdir()
    assert [scene.look() for _ in range(3)] == [None, None, None]


def test_a_process_that_left_its_container_is_orphaned_only_when_that_is_gone(tmp_path: Path) -> None:
    """A moved process still belongs to its container, until the container's cgroup is removed too."""
    cgroup = tmp_path / f"sys/fs/cgroup{DOCKER}"
    cgroup.mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.procs").touch()
    scene = Scene(tmp_path, DOCKER)
    scene.now = ("0::/user.slice/user-1000.slice/session-5.scope",)
    assert [scene.look() for _ in range(3)] == [None, None, None]
    cgroup.rmdir()
    assert scene.look() is None
    why = f"its container {A[:12]} has ended: the process is outside of its cgroup, which was removed"
    assert scene.look() == why


@pytest.mark.parametrize("now", [("0::/user.slice/user-1000.slice/session-5.scope",), None])
def test_a_hierarchy_that_is_not_mounted_ends_nobody(tmp_path: Path, now: tuple[str, ...] | None) -> None:
    """Where what is mounted in the root file system is not seen, or a process's cgroup, none is gone."""
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    scene = Scene(tmp_path, DOCKER)
    scene.now = now
    assert [scene.look() for _ in range(3)] == [None, None, None]


def test_a_user_or_a_unit_does_not_end() -> None:
    """An owner that cannot end before its processes is not watched."""
    for path in ("/", "/system.slice/ollama.service"):
        known = facts(path)
        found = resolve_owner(HostFiles(Path("/nowhere")), known)
        assert ended.watch_process(found.place, known.cgroup or (), found.owner, 1.0) is None


# --- the reader ---------------------------------------------------------------------------------


def row(known: ProcessFacts) -> ProcessRow:
    return ProcessRow(known.pid, known.start, "S", 1, known.pid, known.pid, 0, 1)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_file_system_that_hangs_costs_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Facts come in time without names, and again when the names were found."""
    pod(tmp_path, "main")
    release = threading.Event()
    names = HostFiles.list_names

    def hang(tree: HostFiles, path: str) -> frozenset[str] | None:
        release.wait()
        return names(tree, path)

    monkeypatch.setattr(HostFiles, "list_names", hang)
    owners = OwnerReader(Host(Path("/proc")), tmp_path)
    assert [each.owner and each.owner.name for each in owners.add_owners([facts(POD)], timeout=0.01)] == [UID]
    release.set()
    late: list[ProcessFacts] = []

    def step() -> bool:
        late.extend(owners.add_owners([], timeout=0.1))
        return bool(late)

    wait_until(step, "the name that was late")
    assert [each.owner and each.owner.name for each in late] == ["ml/train-0"]


def test_a_name_that_comes_late_is_found_once_and_not_sought_for_ever(tmp_path: Path) -> None:
    """Missing names are searched at the slow pace, a limited number of times, and reported once."""
    clock = Clock()
    owners = OwnerReader(Host(Path("/proc")), tmp_path, clock=clock)
    known = facts(DOCKER)
    assert owners.add_owners([known], timeout=20)[0].owner == Owner("container", A[:12], container=A[:12])
    assert owners.check_owners([row(known)]) == ({}, [])
    docker(tmp_path, A, "/late")
    told: list[ProcessFacts] = []

    def step() -> bool:
        clock.now += reader.CHECK_INTERVAL
        told.extend(owners.check_owners([row(known)])[1])
        return bool(told)

    wait_until(step, "the name that came late")
    assert [each.owner for each in told] == [Owner("container", "late", container="late")]
    told.clear()
    for _ in range(2 * reader.NAME_ATTEMPTS):
        step()
    assert told == []


def test_an_ended_owner_is_told_until_its_process_is_gone(tmp_path: Path) -> None:
    """The evidence is in every check, only for this process, and ends with it."""
    mark = tmp_path / f"run/runc/{A}"
    mark.mkdir(parents=True)
    clock = Clock()
    owners = OwnerReader(Host(Path("/proc")), tmp_path, clock=clock)
    known = replace(facts(f"/libpod_parent/libpod-{A}"), pid=os.getpid())
    owners.add_owners([known], timeout=20)
    watched = owners._holders[known.pid, known.start].watched  # noqa: SLF001 to know that a look has been
    found: dict[int, str] = {}

    def step() -> bool:
        clock.now += reader.CHECK_INTERVAL
        found.clear()
        found.update(owners.check_owners([row(known)])[0])
        return bool(found or (mark.exists() and sure(watched).seen))

    wait_until(step, "a look")
    mark.rmdir()
    wait_until(step, "the evidence")
    assert list(found) == [known.pid]
    assert owners.check_owners([row(known)])[0] == found
    assert owners.check_owners([row(known)._replace(start=known.start + 1)])[0] == {}
