"""Read and write the marks of one node through the API of Kubernetes, with the token of this pod."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from vramledger.commands.node_marks import CONDITION, NodeMarks
from vramledger.config import SERVICE_ACCOUNT
from vramledger.errors import StartupError, VramledgerError

TIMEOUT = aiohttp.ClientTimeout(total=10.0)
_MAX_ERROR_CHARS = 300
_ATTEMPTS = 5
"""How often a change is tried that another program's change of the node came before."""


class ClusterError(VramledgerError):
    """The API server did not do it; the message says why."""


class _ConflictError(ClusterError):
    """The node has changed since it was read."""


class Taint(NamedTuple):
    """The taint: its key, which is also that of the annotation, and its effect."""

    key: str
    effect: str


class KubernetesNode:
    """One node of the cluster in which this pod runs."""

    def __init__(
        self, name: str, taint: Taint, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
    ) -> None:
        """Find the API server in the environment that the kubelet makes.

        Raises:
            StartupError: this is not a pod with a token.
        """
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (account / "token").is_file():
            message = (
                f"this is not a pod with a token (KUBERNETES_SERVICE_HOST, {account}/token);"
                " the chart runs this command with nodeTaint.enabled=true"
            )
            raise StartupError(message)
        self._url = f"https://{f'[{host}]' if ':' in host else host}:{port}/api/v1/nodes/{name}"
        self._taint = taint
        self._account = account

    async def read(self) -> NodeMarks:
        """Return the marks of the node.

        Raises:
            ClusterError: the API server did not say it.
        """
        return self._marks(await self._request("GET", self._url))

    async def write(self, marks: NodeMarks, present: NodeMarks) -> None:
        """Change the marks of the node to these; all other taints and annotations stay as they are.

        Raises:
            ClusterError: the API server did not carry it out.
        """
        if (marks.tainted, marks.annotation) != (present.tainted, present.annotation):
            await self._write_taint(marks)
        await self._write_condition(marks, changed=marks.status != present.status)

    async def _write_taint(self, marks: NodeMarks) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            node = await self._request("GET", self._url)
            others = [each for each in node["spec"].get("taints") or [] if each.get("key") != self._taint.key]
            own = [{"key": self._taint.key, "effect": self._taint.effect}] if marks.tainted else []
            change = {
                # A patch replaces the whole list. With the version it fails if somebody else has changed it.
                "metadata": {
                    "resourceVersion": node["metadata"]["resourceVersion"],
                    "annotations": {self._taint.key: marks.annotation or None},
                },
                "spec": {"taints": [*others, *own] or None},
            }
            try:
                await self._request("PATCH", self._url, change, "application/merge-patch+json")
            except _ConflictError:
                if attempt == _ATTEMPTS:
                    raise
                continue
            return

    async def _write_condition(self, marks: NodeMarks, *, changed: bool) -> None:
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        reason = {"True": "LeftOver", "False": "Clean", "Unknown": "CannotTell"}[marks.status]
        condition = {
            "type": CONDITION,
            "status": marks.status,
            "reason": reason,
            "message": marks.message,
            "lastHeartbeatTime": now,
        }
        if changed:
            condition["lastTransitionTime"] = now
        # The strategic merge changes the one condition of this type and keeps all others.
        kind = "application/strategic-merge-patch+json"
        await self._request("PATCH", f"{self._url}/status", {"status": {"conditions": [condition]}}, kind)

    def _marks(self, node: Mapping[str, Any]) -> NodeMarks:
        taints = node["spec"].get("taints") or []
        conditions = node.get("status", {}).get("conditions") or []
        ours: Mapping[str, str] = next((each for each in conditions if each.get("type") == CONDITION), {})
        return NodeMarks(
            any(each.get("key") == self._taint.key for each in taints),
            (node["metadata"].get("annotations") or {}).get(self._taint.key, ""),
            ours.get("status", ""),
            ours.get("message", ""),
        )

    async def _request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """Send a request, and return the object in the answer.

        The token and the certificate are read for each request, because the kubelet renews both.
        """
        try:
            token = (self._account / "token").read_text(encoding="ascii").strip()
            trust = ssl.create_default_context(cafile=self._account / "ca.crt")
            headers = {"Authorization": f"Bearer {token}", "Content-Type": kind}
            async with (
                aiohttp.ClientSession(timeout=TIMEOUT) as session,
                session.request(
                    method, url, json=body, headers=headers, ssl=trust, allow_redirects=False
                ) as answer,
            ):
                if answer.status == 409:  # noqa: PLR2004 Conflict
                    message = f"{method} {url}: the node was changed meanwhile"
                    raise _ConflictError(message)
                if answer.status != 200:  # noqa: PLR2004 OK
                    text = (await answer.text(errors="replace"))[:_MAX_ERROR_CHARS]
                    message = f"{method} {url}: {answer.status} {' '.join(text.split())}"
                    raise ClusterError(message)
                found = await answer.json(content_type=None)
        except (OSError, aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            message = f"{method} {url}: {str(error) or type(error).__name__}"
            raise ClusterError(message) from error
        if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
            message = f"{method} {url}: the answer is not a node"
            raise ClusterError(message)
        return found


def in_cluster(name: str, taint: Taint) -> KubernetesNode:
    """Return a node of the cluster in which this pod runs.

    Raises:
        StartupError: this is not a pod with a token.
    """
    return KubernetesNode(name, taint, os.environ)
