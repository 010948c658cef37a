"""Find the names of pods, and the labels of those that concern us; no sample waits for the labels.

The names are in the directories that the kubelet keeps for logs, by its documented layout:
``/var/log/pods/NAMESPACE_POD_UID/CONTAINER/`` and ``/var/log/containers/POD_NAMESPACE_CONTAINER-ID.log``.
Only names are read; the log files, which the second directory links to, are never opened.

The labels need an API. The kubelet's ``/pods`` needs ``get`` on ``nodes/pods`` (Kubernetes 1.33). Before that
it needs ``nodes/proxy``, which also allows to run commands in every pod, so nobody should have it for this.
The API server needs ``list`` on ``pods``.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import quote

import msgspec

from vramledger.config import PodConfig
from vramledger.kubernetes.api_client import ClusterError, ClusterServer, find_api_server
from vramledger.logs import fields, log
from vramledger.model.reading import PodLabels, ProcessFacts, ProcessRow, Scheduler
from vramledger.model.records import READ_ERRORS, label_text
from vramledger.readers.collector import BoundedReader, Collector, Context, Health, Part
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
    for each in map(_LOG.fullmatch, files.list_names(CONTAINERS) or ()):
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


_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

Labels = Mapping[str, str]
Pods = Mapping[tuple[str, str], Labels]
"""The allowed labels that each pod has, by namespace and name."""


class _Source(NamedTuple):
    name: str
    server: ClusterServer
    path: str


class PodApi:
    """The kubelet and the API server, as this pod reaches them."""

    def __init__(self, config: PodConfig, environ: Mapping[str, str]) -> None:
        """Find both; nobody is asked yet. The kubelet names the API server in ``environ``."""
        self._allowed = frozenset(config.labels)
        self._sources = []
        if config.kubelet is not None:
            kubelet = ClusterServer(config.kubelet.host, config.kubelet.port, config.credentials)
            self._sources.append(_Source("the kubelet", kubelet, "/pods"))
        if server := find_api_server(environ, config.credentials):
            # Version 0 lets the API server answer from its memory.
            chosen = f"fieldSelector={quote(f'spec.nodeName={config.node}', safe='')}&resourceVersion=0"
            self._sources.append(_Source("the API server", server, f"/api/v1/pods?{chosen}"))

    def read(self) -> Pods:
        """Return this node's pods' labels, from the first source that tells. Raises ClusterError if none."""
        problems = []
        for name, server, path in self._sources:
            try:
                return parse_pods(server.request("GET", path, {"Accept": _METADATA_ONLY}), self._allowed)
            except ClusterError as error:
                problems.append(f"{name} at {server.host}:{server.port}: {error}")
        raise ClusterError("; ".join(problems) or "this is not a pod (KUBERNETES_SERVICE_HOST is not set)")


class _Metadata(msgspec.Struct, rename={"created": "creationTimestamp"}):
    namespace: str
    name: str
    created: str | None = None
    labels: dict[str, object] | None = None


class _ListedPod(msgspec.Struct):
    metadata: _Metadata


class _PodList(msgspec.Struct):
    items: list[msgspec.Raw] | None


def parse_pods(body: bytes, allowed: frozenset[str]) -> Pods:
    """Read a list of pods, whole or metadata; others are left out. Raises ClusterError if not a list."""
    try:
        listed = msgspec.json.decode(body, type=_PodList).items or []
    except READ_ERRORS as error:
        raise ClusterError("the answer is not a list of pods") from error
    made: dict[tuple[str, str], str] = {}
    pods: dict[tuple[str, str], Labels] = {}
    for each in listed:
        try:
            metadata = msgspec.json.decode(each, type=_ListedPod).metadata
        except READ_ERRORS:
            continue
        pod = metadata.namespace, metadata.name
        time = metadata.created or ""
        if made.get(pod, "") > time:
            continue  # a kubelet may still end a pod while it starts the next one of the same name
        made[pod] = time
        pods[pod] = {
            name: value
            for name, value in (metadata.labels or {}).items()
            if name in allowed and isinstance(value, str)
        }
    return pods


READ_INTERVAL = 60.0
"""Seconds between two requests: labels of a running pod hardly change."""

SPACING = 5.0
"""Seconds after a request at which a pod that is new since then leads to the next one."""

KEEP = 300.0
"""Seconds for which labels are kept while neither source gives them: an API server starts in less."""

STUCK_AFTER = 30.0
"""Seconds after which a request is given up: two addresses that answer nothing take ten."""

MAX_PODS = 512
"""Pods of which labels are kept; a node has a few hundred at most."""

Pod = tuple[str, str]
"""Namespace and name."""


class HolderPods:
    """Know which pods hold memory or have a device reserved."""

    def __init__(self) -> None:
        self._pods: dict[tuple[int, int], Pod] = {}

    def update(
        self,
        rows: Iterable[ProcessRow],
        unseen: Collection[int],
        facts: Iterable[ProcessFacts],
        schedulers: Iterable[Scheduler],
    ) -> set[Pod]:
        """Return a sample's pods; a pid that only NVML lists has the pod that its process had."""
        for each in facts:
            if each.owner is not None and each.owner.pod and each.owner.namespace:
                self._pods[each.pid, each.start] = (each.owner.namespace, each.owner.pod)
        present = {(row.pid, row.start) for row in rows}
        self._pods = {
            identity: pod
            for identity, pod in self._pods.items()
            if identity in present or identity[0] in unseen
        }
        granted = (grant for each in schedulers for grant in each.grants if grant.type == "pod")
        reserved = (grant.name.partition("/") for grant in granted)
        return {*self._pods.values(), *((namespace, pod) for namespace, _, pod in reserved)}


class _Answer(NamedTuple):
    pods: Pods | None
    problem: str
    seconds: float


class PodLabelReader(Collector):
    """Ask in a thread, and only while there are pods that concern us."""

    def __init__(
        self, ask: Callable[[], Pods], labels: tuple[str, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._labels = labels
        self._clock = clock
        self._requests: BoundedReader[_Answer] = BoundedReader(
            stuck_after=STUCK_AFTER, max_stuck=1, clock=clock
        )
        self._known: dict[Pod, Labels] = {}
        self._asked_for: frozenset[Pod] = frozenset()
        self._asked = float("-inf")
        self._answered = float("-inf")
        self._problem = ""
        self._holders = HolderPods()
        self._schedulers: tuple[Scheduler, ...] = ()
        self._health: tuple[bool, float] | None = None
        self._error: Exception | None = None

    @property
    def health(self) -> Health | None:
        """Whether the last request succeeded, and its seconds; None before its end, and without any pod."""
        return self._health

    def read(self, context: Context) -> Part:
        """Return what is known of the pods of this sample."""
        if "schedulers" in context.parts:  # else reading them has failed, and it are those of before
            self._schedulers = context.schedulers
        pods = self._holders.update(context.rows, context.unseen, context.facts, self._schedulers)
        return {"pods": self.update(pods)}

    def errors(self) -> Iterator[Exception]:
        """Yield what the last request has raised besides a refusal."""
        if self._error is not None:
            yield self._error

    def update(self, wanted: Collection[Pod]) -> tuple[PodLabels, ...]:
        """Return what is known of these pods, also after their end, and have it read when it is time."""
        pods = frozenset(sorted(wanted)[:MAX_PODS])
        for answer in self._requests.collect(0.0):
            self._accept_answer(answer)
        failed = self._requests.take_errors()
        if failed and self._error is None:
            self._asked = float("-inf")  # once more at once
        if failed:
            self._error = next(iter(failed.values()))
            self._known.clear()
        self._known = {pod: labels for pod, labels in self._known.items() if pod in pods}
        if not pods:
            self._health = self._error = None
            return ()
        age = self._clock() - self._asked
        if not self._requests.busy and (age >= READ_INTERVAL or (age >= SPACING and pods - self._asked_for)):
            self._asked, self._asked_for = self._clock(), pods
            self._requests.submit("pods", self._request, lambda: _Answer(None, "no answer", STUCK_AFTER))
        return tuple(
            PodLabels(*pod, tuple((name, self._known[pod].get(name)) for name in self._labels))
            for pod in sorted(self._known)
        )

    def _request(self) -> _Answer:
        begun = self._clock()
        try:
            return _Answer(self._ask(), "", self._clock() - begun)
        except ClusterError as error:
            return _Answer(None, str(error), self._clock() - begun)

    def _accept_answer(self, answer: _Answer) -> None:
        self._error = None
        self._health = (answer.pods is not None, answer.seconds)
        if answer.pods is not None:
            self._answered = self._clock()
            for pod in self._asked_for & answer.pods.keys():
                self._known[pod] = {
                    name: label_text(value)
                    for name, value in answer.pods[pod].items()
                    if name in self._labels
                }
        elif self._clock() - self._answered > KEEP:
            self._known.clear()
        if answer.problem and answer.problem != self._problem:
            log.warning("Cannot read labels of pods", extra=fields(err=answer.problem))
        elif self._problem and not answer.problem:
            log.info("Reading labels of pods again")
        self._problem = answer.problem
