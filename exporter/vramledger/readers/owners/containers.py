"""Find names of containers in files of Docker, Podman, CRI-O and nerdctl; their environment is dropped."""

from __future__ import annotations

import itertools
import re
from datetime import datetime
from typing import Any

from vramledger.exchange import read_json
from vramledger.readers.owners.cgroups import ContainerMark
from vramledger.readers.owners.host_files import HostFiles

DOCKER = "var/lib/docker/containers"
PODMAN = "var/lib/containers/storage/overlay-containers"

NERDCTL = "var/lib/nerdctl"
"""Below it, ``HASH/names/NAMESPACE/NAME`` holds the id of a container of plain containerd."""

MAX_NERDCTL_NAMES = 500
"""The maximum number of nerdctl's name files that are read to find a container; each container has one."""

_CONFIG_CAP = 4 * 1024 * 1024
_LIST_CAP = 16 * 1024 * 1024
_ID_CAP = 256
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,254}", re.ASCII)


def read_container_name(files: HostFiles, container: ContainerMark) -> str:
    """Return the name a person gave a container, empty if unknown; cgroupfs paths may hide the runtime."""
    if container.runtime in ("lxc", "nspawn"):
        return container.id
    if container.runtime in ("docker", "") and (name := _docker_name(files, container.id)):
        return name
    if container.runtime in ("podman", "cri-o", ""):
        return _podman_name(files, container.id)
    if container.runtime in ("nerdctl", "containerd"):
        return _nerdctl_name(files, container.id)
    return ""


def has_docker_recorded_end(files: HostFiles, container: str, since: float) -> bool:
    """Tell whether Docker itself has recorded that a container ended, at a Unix time after ``since``.

    Docker writes it at every start and end; while a daemon is down, its containers stay recorded as running.
    An older end may be in a copy that is no longer used.
    """
    state = _docker_config(files, container).get("State")
    if not isinstance(state, dict) or state.get("Pid") != 0:
        return False
    ended = _parse_docker_time(state.get("FinishedAt"))
    stopped = all(state.get(name) is False for name in ("Running", "Paused", "Restarting"))
    return stopped and ended is not None and ended > since


def _parse_docker_time(text: object) -> float | None:
    if not isinstance(text, str) or not text.endswith("Z"):
        return None
    try:
        return datetime.strptime(f"{text[:19]}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (ValueError, OverflowError):
        return None


def _docker_config(files: HostFiles, container: str) -> dict[str, Any]:
    config = _parse_json(files.read(f"{DOCKER}/{container}/config.v2.json", _CONFIG_CAP))
    return config if isinstance(config, dict) else {}


def _docker_name(files: HostFiles, container: str) -> str:
    name = _docker_config(files, container).get("Name")
    return _validated_name(name.removeprefix("/")) if isinstance(name, str) else ""


def _podman_name(files: HostFiles, container: str) -> str:
    listed = _parse_json(files.read(f"{PODMAN}/containers.json", _LIST_CAP))
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("id") == container:
            names = each.get("names")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return _validated_name(names[0])
    return ""


def _nerdctl_name(files: HostFiles, container: str) -> str:
    named = (
        (f"{NERDCTL}/{hashed}/names/{namespace}", name)
        for hashed in sorted(files.list_directories(NERDCTL) or ())
        for namespace in sorted(files.list_directories(f"{NERDCTL}/{hashed}/names") or ())
        for name in sorted(files.list_names(f"{NERDCTL}/{hashed}/names/{namespace}") or ())
    )
    for place, name in itertools.islice(named, MAX_NERDCTL_NAMES):
        if (files.read(f"{place}/{name}", _ID_CAP) or b"").strip() == container.encode():
            return _validated_name(name)
    return ""


def _parse_json(data: bytes | None) -> Any:  # noqa: ANN401 another program's file may hold anything
    try:
        return read_json(data) if data else None
    except ValueError:
        return None


def _validated_name(name: str) -> str:
    return name if _NAME.fullmatch(name) else ""
