"""Read and write the marks of one node through the API of Kubernetes, with the token of this pod."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from datetime import datetime, timezone
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from vramledger.config import SERVICE_ACCOUNT
from vramledger.errors import StartupError
from vramledger.kubernetes.api_client import ClusterError, find_api_server
from vramledger.kubernetes.node_marks import CONDITION, NodeMarks

TIMEOUT = 10.0
"""Seconds for a whole request."""

_ATTEMPTS = 5
"""How often a change is tried that another program's change of the node came before."""


class Taint(NamedTuple):
    """The taint: its key, which is also that of the annotation, and its effect."""

    key: str
    effect: str


class KubernetesNode:
    """One node of the cluster in which this pod runs."""

    def __init__(
        self, name: str, taint: Taint, environ: Mapping[str, str], account: Path = SERVICE_ACCOUNT
    ) -> None:
        """Find the API server by the environment. Raises StartupError outside of a pod with a token."""
        server = find_api_server(environ, account)
        if server is None or not (account / "token").is_file():
            message = (
                f"this is not a pod with a token (KUBERNETES_SERVICE_HOST, {account}/token);"
                " the chart runs this command with nodeTaint.enabled=true"
            )
            raise StartupError(message)
        self._server = server
        self._path = f"/api/v1/nodes/{name}"
        self._taint = taint

    async def read(self) -> NodeMarks:
        """Return the marks of the node. Raises ClusterError if the API server did not say it."""
        return self._marks(await self._request("GET"))

    async def write(self, marks: NodeMarks, present: NodeMarks) -> None:
        """Change the node's marks to these; others stay. Raises ClusterError if the API server did not."""
        if (marks.tainted, marks.annotation) != (present.tainted, present.annotation):
            await self._write_taint(marks)
        await self._write_condition(marks, changed=marks.status != present.status)

    async def _write_taint(self, marks: NodeMarks) -> None:
        for attempt in range(1, _ATTEMPTS + 1):
            node = await self._request("GET")
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
                await self._request("PATCH", "", change, "application/merge-patch+json")
            except ClusterError as error:
                if error.status != HTTPStatus.CONFLICT or attempt == _ATTEMPTS:
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
        await self._request("PATCH", "/status", {"status": {"conditions": [condition]}}, kind)

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
        self, method: str, of: str = "", body: Mapping[str, Any] | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        """Send a request about the node or a part ``of`` it, and return the object in the answer."""
        path = self._path + of
        about = f"{method} {path} at {self._server.host}:{self._server.port}"
        content = None if body is None else json.dumps(body).encode()
        request = asyncio.to_thread(self._server.request, method, path, {"Content-Type": kind}, content)
        try:
            found = json.loads(await asyncio.wait_for(request, TIMEOUT))
        except (asyncio.TimeoutError, ClusterError, ValueError) as error:
            message = f"{about}: {str(error) or type(error).__name__}"
            raise ClusterError(message, getattr(error, "status", None)) from error
        if not isinstance(found, dict) or not isinstance(found.get("spec"), dict):
            message = f"{about}: the answer is not a node"
            raise ClusterError(message)
        return found


def in_cluster(name: str, taint: Taint) -> KubernetesNode:
    """Return a node of this pod's cluster. Raises StartupError if this is not a pod with a token."""
    return KubernetesNode(name, taint, os.environ)
