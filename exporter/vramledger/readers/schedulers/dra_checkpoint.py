"""Read the checkpoint of NVIDIA's DRA driver: which UUID each device of a prepared claim has.

From documentation, not seen on a node: ``v1``, ``v2`` and ``v3`` hold the same claims in ``preparedClaims``.
Below that, each prepared device has a member ``device`` with the name that the kubelet shows. Its UUID is
beside it, in ``info`` or a member of another name. Newer drivers move them, so they are searched for. A claim
whose preparation has only begun has no device yet.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vramledger.readers.owners.host_files import HostFiles

CHECKPOINT = "var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json"
REGISTRY = "var/lib/kubelet/plugins_registry"
VERSIONS = ("v1", "v2", "v3")
"""The later ones count."""

_CAP = 8 * 2**20
_DEPTH = 12
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{36}", re.ASCII)
_SOCKET = re.compile(r"gpu\.nvidia\.com(?:-[\w-]+)?-reg\.sock", re.ASCII)


def is_running(rootfs: Path) -> bool:
    """Tell whether the driver is registered with the kubelet: a checkpoint alone may be one of long ago."""
    names = HostFiles(rootfs).list_names(REGISTRY) or ()
    for name in names:
        if _SOCKET.fullmatch(name):
            try:
                return stat.S_ISSOCK((rootfs / REGISTRY / name).stat().st_mode)
            except OSError:
                return False
    return False


def read_devices(rootfs: Path) -> Mapping[str, str]:
    """Return the UUIDs of prepared devices by their names; empty without such a driver."""
    data = HostFiles(rootfs).read(CHECKPOINT, _CAP)
    return {} if data is None else parse_devices(data)


def parse_devices(data: bytes) -> dict[str, str]:
    """Read a checkpoint; what is not understood is left out."""
    try:
        checkpoint = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    found: dict[str, str] = {}
    for version in VERSIONS:
        content = checkpoint.get(version) if isinstance(checkpoint, dict) else None
        claims = content.get("preparedClaims") if isinstance(content, dict) else None
        found.update(_prepared(claims, _DEPTH))
    return found


def _prepared(value: Any, depth: int) -> Iterator[tuple[str, str]]:  # noqa: ANN401 another program's JSON
    """Yield name and UUID of every prepared device below a value."""
    if depth == 0:
        return
    if isinstance(value, list):
        for each in value:
            yield from _prepared(each, depth - 1)
    if not isinstance(value, dict):
        return
    device = value.get("device")
    name = _member(device, "devicename") if isinstance(device, dict) else None
    if name is not None:
        others = [each for key, each in value.items() if key != "device"]
        uuids = [uuid for each in others for uuid in _uuids(each, depth - 1)]
        # An instance may also name its GPU.
        instances = [uuid for uuid in uuids if uuid.startswith("MIG-")]
        distinct = set(instances or uuids)
        if len(distinct) == 1:
            yield name, distinct.pop()
        return
    for each in value.values():
        yield from _prepared(each, depth - 1)


def _uuids(value: Any, depth: int) -> Iterator[str]:  # noqa: ANN401
    """Yield the UUIDs of GPUs and instances that a value has below it."""
    if depth == 0:
        return
    if isinstance(value, str) and _UUID.fullmatch(value):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _uuids(each, depth - 1)


def _member(content: Mapping[str, Any], name: str) -> str | None:
    """Return a text by its name in any case: Go writes a field without a tag as ``DeviceName``."""
    found = next((each for key, each in content.items() if key.lower() == name), None)
    return found if isinstance(found, str) and found else None
