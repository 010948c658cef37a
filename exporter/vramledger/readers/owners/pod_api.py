"""Ask Kubernetes for the labels of this node's pods: the kubelet, or the API server.

The kubelet's ``/pods`` needs ``get`` on ``nodes/pods`` (Kubernetes 1.33). Before that it needs
``nodes/proxy``, which also allows to run commands in every pod, so nobody should have it for this. The API
server needs ``list`` on ``pods``. It is asked only for the metadata of pods, and only for those of this node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from vramledger.config import PodConfig
from vramledger.errors import VramledgerError

if TYPE_CHECKING:
    import ssl

TIMEOUT = 5.0
"""Seconds for which a connection may be silent."""

MAX_BYTES = 32 * 2**20
"""The longest answer that is read: a kubelet with 250 pods, each of 100 KiB, has less."""

_MAX_ERROR_CHARS = 200
_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_OK = 200

Labels = Mapping[str, str]
Pods = Mapping[tuple[str, str], Labels]
"""The allowed labels that each pod has, by namespace and name."""


class PodApiError(VramledgerError):
    """Nobody told the labels; the message says why."""


class _Source(NamedTuple):
    name: str
    host: str
    port: int
    path: str


class PodApi:
    """The kubelet and the API server, as this pod reaches them."""

    def __init__(self, config: PodConfig, environ: Mapping[str, str]) -> None:
        """Find both; nobody is asked yet.

        Args:
            config: what to ask for, and the kubelet's address.
            environ: the environment, in which the kubelet names the API server.
        """
        self._allowed = frozenset(config.labels)
        self._credentials = config.credentials
        self._sources = []
        if config.kubelet is not None:
            self._sources.append(_Source("the kubelet", config.kubelet.host, config.kubelet.port, "/pods"))
        if host := environ.get("KUBERNETES_SERVICE_HOST"):
            # Version 0 lets the API server answer from its memory.
            chosen = f"fieldSelector={quote(f'spec.nodeName={config.node}', safe='')}&resourceVersion=0"
            port = int(environ.get("KUBERNETES_SERVICE_PORT", "443"))
            self._sources.append(_Source("the API server", host, port, f"/api/v1/pods?{chosen}"))

    def read(self) -> Pods:
        """Return the labels of this node's pods, from the first source that tells them.

        Raises:
            PodApiError: no source does.
        """
        problems = []
        for source in self._sources:
            try:
                return parse_pods(self._request(source), self._allowed)
            except PodApiError as error:
                problems.append(f"{source.name} at {source.host}:{source.port}: {error}")
        message = "; ".join(problems) or "this is not a pod (KUBERNETES_SERVICE_HOST is not set)"
        raise PodApiError(message)

    def _request(self, source: _Source) -> bytes:
        """Return the body of an answer.

        The token and the certificate are read for each request, because the kubelet renews both. The token is
        sent only to a server whose certificate the cluster's authority has signed.
        """
        # Only with --pods.labels: with ssl it takes 5 MiB of the sampler (Python 3.11).
        from http.client import HTTPException, HTTPSConnection  # noqa: PLC0415

        try:
            token = (self._credentials / "token").read_text(encoding="ascii").strip()
            connection = HTTPSConnection(
                source.host, source.port, timeout=TIMEOUT, context=_trust(self._credentials / "ca.crt")
            )
            try:
                headers = {"Authorization": f"Bearer {token}", "Accept": _METADATA_ONLY}
                connection.request("GET", source.path, headers=headers)
                answer = connection.getresponse()
                body = answer.read(MAX_BYTES + 1)
            finally:
                connection.close()
        except (OSError, HTTPException, ValueError) as error:
            raise PodApiError(str(error) or type(error).__name__) from error
        if answer.status != _OK:
            text = " ".join(body[: 4 * _MAX_ERROR_CHARS].decode(errors="replace").split())
            message = f"{answer.status} {text[:_MAX_ERROR_CHARS]}".strip()
            raise PodApiError(message)
        if len(body) > MAX_BYTES:
            message = f"the answer is longer than {MAX_BYTES // 2**20} MiB"
            raise PodApiError(message)
        return body


def _trust(authority: Path) -> ssl.SSLContext:
    import ssl  # noqa: PLC0415 see above

    context = ssl.create_default_context(cafile=authority)
    # Since Python 3.13 an authority must have identifiers of keys, which those of some clusters do not have.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def parse_pods(body: bytes, allowed: frozenset[str]) -> Pods:
    """Read a list of pods, whole ones or their metadata alone.

    Raises:
        PodApiError: this is not such a list.
    """
    kept = allowed | {"items", "metadata", "labels", "namespace", "name", "creationTimestamp"}

    def prune(found: dict[str, Any]) -> dict[str, Any]:
        """Keep what we need of each object, so that whole pods are never in memory."""
        return {name: value for name, value in found.items() if name in kept}

    try:
        answer = json.loads(body, object_hook=prune)
    except (ValueError, RecursionError) as error:
        message = "the answer is not JSON"
        raise PodApiError(message) from error
    if not isinstance(answer, dict) or not isinstance(items := answer.get("items", ""), (list, type(None))):
        message = "the answer is not a list of pods"
        raise PodApiError(message)
    made: dict[tuple[str, str], str] = {}
    pods: dict[tuple[str, str], Labels] = {}
    for item in items or ():
        metadata = item.get("metadata") if isinstance(item, dict) else None
        if not isinstance(metadata, dict):
            continue
        pod = (str(metadata.get("namespace")), str(metadata.get("name")))
        time = str(metadata.get("creationTimestamp") or "")
        if pod in made and made[pod] > time:
            continue  # a kubelet may still end a pod while it starts the next one of the same name
        labels = metadata.get("labels")
        made[pod] = time
        pods[pod] = {
            name: value
            for name, value in (labels.items() if isinstance(labels, dict) else ())
            if name in allowed and isinstance(value, str)
        }
    return pods
