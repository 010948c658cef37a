"""Find names of pods and their containers, in the directories that the kubelet keeps for their logs.

The code follows the kubelet's documented layout: ``/var/log/pods/NAMESPACE_POD_UID/CONTAINER/`` and
``/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log``. Only names are read; the log files, which the second
directory links to, are never opened. No access to the API is needed.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from vramledger.readers.owners.host_files import HostFiles

PODS = "var/log/pods"
CONTAINERS = "var/log/containers"

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_SUBDOMAIN = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
_DIRECTORY = re.compile(rf"(?P<namespace>{_LABEL})_(?P<pod>{_SUBDOMAIN})_(?P<uid>[0-9a-f-]{{32,36}})")
_LOG = re.compile(
    rf"(?P<pod>{_SUBDOMAIN})_(?P<namespace>{_LABEL})_(?P<container>{_LABEL})-(?P<id>[0-9a-f]{{64}})\.log"
)
_RUNTIME_NAME = re.compile(
    rf"k8s_(?P<container>{_LABEL})_(?P<pod>{_SUBDOMAIN})_(?P<namespace>{_LABEL})_(?P<uid>[0-9a-f-]{{32,36}})_[0-9]+"
)


class PodNames(NamedTuple):
    """The names of a pod; ``container`` is empty when it is not known which of its containers it is."""

    namespace: str
    pod: str
    container: str = ""


def read_pod_names(files: HostFiles, uid: str, container_ids: tuple[str, ...]) -> PodNames | None:
    """Return the names of a pod and of its container that has one of the ids."""
    for name in files.list_names(PODS) or ():
        match = _DIRECTORY.fullmatch(name)
        if match is not None and match["uid"] == uid:
            break
    else:
        return None
    found = PodNames(match["namespace"], match["pod"])
    for log in files.list_names(CONTAINERS) or ():
        each = _LOG.fullmatch(log)
        if each is not None and each["id"] in container_ids and (each["namespace"], each["pod"]) == found[:2]:
            return found._replace(container=each["container"])
    inside = [each for each in files.list_names(f"{PODS}/{name}") or () if re.fullmatch(_LABEL, each)]
    return found._replace(container=inside[0]) if len(inside) == 1 else found


def parse_runtime_name(name: str, uid: str) -> PodNames | None:
    """Parse the name that the kubelet gives to a container in Docker and CRI-O, if it names this pod."""
    match = _RUNTIME_NAME.fullmatch(name)
    if match is None or match["uid"] != uid:
        return None
    return PodNames(match["namespace"], match["pod"], match["container"])
