"""An API server of Kubernetes for one node: TLS, a token, versions of objects, two kinds of patches."""

import copy
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.support.certificates import Pair

TOKEN = "a.service.account"  # noqa: S105 of the stand-in alone
NODE = "gpu-7"


@dataclass
class ApiServer:
    """The node, and what was asked: method, path and content type of each request that was let in."""

    node: dict[str, Any] = field(
        default_factory=lambda: {
            "kind": "Node",
            "metadata": {"name": NODE, "resourceVersion": "1", "annotations": {"other": "kept"}},
            "spec": {"podCIDR": "10.0.0.0/24", "taints": [{"key": "other", "effect": "NoSchedule"}]},
            "status": {"conditions": [{"type": "Ready", "status": "True"}]},
        }
    )
    asked: list[tuple[str, str, str]] = field(default_factory=list)
    refuse: int = 0  # status with which requests are refused instead
    refused: int = 0  # how many were
    conflicts: int = 0  # how many changes another program's change comes before
    port: int = 0

    @property
    def taints(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.node["spec"].get("taints", [])
        return found

    def condition(self, kind: str) -> dict[str, Any]:
        """Return a condition, empty when the node has none of this type."""
        return next((each for each in self.node["status"]["conditions"] if each["type"] == kind), {})

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if self.refuse:
            self.refused += 1
            return web.Response(text="[" * 100_000, status=self.refuse)
        self.asked.append((request.method, request.path, request.content_type))
        if request.method == "PATCH":
            change = await request.json()
            version = change.get("metadata", {}).pop("resourceVersion", None)
            if self.conflicts:
                self.conflicts -= 1
                self._changed()
            if version not in (None, self.node["metadata"]["resourceVersion"]):
                return web.json_response({"kind": "Status", "reason": "Conflict"}, status=409)
            strategic = request.content_type == "application/strategic-merge-patch+json"
            status = request.path.endswith("/status")
            if status != (set(change) == {"status"}) or status != strategic:
                return web.json_response({"kind": "Status", "message": "not this way"}, status=422)
            if strategic:
                self._merge_conditions(change["status"]["conditions"])
            else:
                self.node = merged(self.node, change)
            self._changed()
        return web.json_response(self.node)

    def _merge_conditions(self, conditions: list[dict[str, Any]]) -> None:
        kept = {each["type"]: each for each in self.node["status"]["conditions"]}
        for each in conditions:
            kept[each["type"]] = {**kept.get(each["type"], {}), **each}
        self.node["status"]["conditions"] = list(kept.values())

    def _changed(self) -> None:
        metadata = self.node["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)


def merged(before: Any, change: Any) -> Any:  # noqa: ANN401 JSON
    """Return what a merge patch makes (RFC 7396)."""
    if not isinstance(change, dict):
        return change
    found = copy.deepcopy(before) if isinstance(before, dict) else {}
    for name, value in change.items():
        if value is None:
            found.pop(name, None)
        else:
            found[name] = merged(found.get(name), value)
    return found


@asynccontextmanager
async def serve_api(pair: Pair) -> AsyncIterator[ApiServer]:
    """Serve the node over TLS on a port of loopback."""
    server = ApiServer()
    app = web.Application()
    for path in (f"/api/v1/nodes/{NODE}", f"/api/v1/nodes/{NODE}/status"):
        app.router.add_route("*", path, server.answer)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    server.port = runner.addresses[0][1]
    try:
        yield server
    finally:
        await runner.cleanup()


def write_account(folder: Path, authority: Pair) -> Path:
    """Write the files of a service account, as the kubelet projects them."""
    folder.mkdir(exist_ok=True)
    (folder / "token").write_text(TOKEN, encoding="ascii")
    (folder / "ca.crt").write_bytes(authority.certificate.read_bytes())
    return folder
