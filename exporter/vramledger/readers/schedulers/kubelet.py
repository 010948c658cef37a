"""Read which devices the kubelet gave to pods, from its pod-resources socket (v1: Kubernetes 1.28).

``List`` names the devices of every container, by the device plugin's ids and by DRA claims.
``GetAllocatableResources`` names the devices that the plugins offer, assigned or not. The messages are read
field by field from the wire: unknown fields, and those of a newer kubelet, are ignored.

A DRA claim names a device only in the words of its driver (``gpu-0-mig-9-4-4``). Which UUID that is, NVIDIA's
driver writes into its checkpoint on the node (:mod:`dra_checkpoint`).
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path

from vramledger.model.reading import Grant, Scheduler
from vramledger.readers.schedulers import dra_checkpoint
from vramledger.readers.schedulers.grpc_call import GrpcError, call_method

SOCKET = "var/lib/kubelet/pod-resources/kubelet.sock"
NAME = "kubelet"

TIMEOUT = 2.0
"""Seconds for one call; the kubelet answers from memory."""

DRA_DRIVER = "gpu.nvidia.com"

_SERVICE = "/v1.PodResourcesLister/"
_VENDOR = "nvidia.com/"
_CDI_KINDS = ("nvidia.com/gpu=", "k8s.gpu.nvidia.com/")
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


def read_kubelet(rootfs: Path) -> Scheduler | None:
    """Read from the kubelet of a host; None when there is no kubelet or it does not answer.

    It waits for at most twice :data:`TIMEOUT`.
    """
    path = rootfs / SOCKET
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return None
        grants = tuple(parse_grants(call_method(str(path), f"{_SERVICE}List", TIMEOUT)))
        uuids = dra_checkpoint.read_devices(rootfs)
        grants = tuple(
            each._replace(devices=tuple(uuids.get(name, name) for name in each.devices)) for each in grants
        )
    except (OSError, GrpcError, ValueError):
        return None
    try:
        managed = parse_allocatable(call_method(str(path), f"{_SERVICE}GetAllocatableResources", TIMEOUT))
    except (GrpcError, ValueError):
        managed = ()  # an older kubelet: only what it has assigned is known
    if dra_checkpoint.is_running(rootfs):
        managed = (*managed, "*")  # the driver offers every GPU of its node, granted before or not
    return Scheduler(NAME, managed, grants)


def parse_grants(message: bytes) -> Iterator[Grant]:
    """Read a ``ListPodResourcesResponse``: one grant for each pod that has GPUs.

    Raises:
        ValueError: this is not such a message.
    """
    for pod in _read_fields(message, 1):
        name, namespace = _read_string(pod, 1), _read_string(pod, 2)
        devices: list[str] = []
        for container in _read_fields(pod, 3):
            for each in _read_fields(container, 2):
                devices += _parse_plugin_devices(each)
            for resource in _read_fields(container, 5):
                for claimed in _read_fields(resource, 4):
                    devices += _parse_claimed_devices(claimed)
        if devices:
            yield Grant("pod", f"{namespace}/{name}", tuple(dict.fromkeys(devices)))


def parse_allocatable(message: bytes) -> tuple[str, ...]:
    """Read an ``AllocatableResourcesResponse``: the GPUs that device plugins offer.

    Raises:
        ValueError: this is not such a message.
    """
    return tuple(
        dict.fromkeys(device for each in _read_fields(message, 1) for device in _parse_plugin_devices(each))
    )


def _parse_plugin_devices(message: bytes) -> list[str]:
    """Return the ids of a ``ContainerDevices``; ``nvidia.com/`` also precedes network adapters."""
    resource = _read_string(message, 1).removeprefix(_VENDOR)
    if resource == _read_string(message, 1) or not resource.startswith(("gpu", "mig-")):
        return []
    return [part.decode(errors="replace") for part in _read_fields(message, 2)]


def _parse_claimed_devices(message: bytes) -> list[str]:
    """Return the device of a ``ClaimResource``, by its name in the driver's pool (``gpu-0``).

    If this name is missing, return the CDI name: ``nvidia.com/gpu=GPU-…``, or ``…claim=UID-gpu-0``.
    """
    names = [_read_string(part, 1) for part in _read_fields(message, 1)]
    if _read_string(message, 2) == DRA_DRIVER:
        return (
            [_read_string(message, 4)]
            if _read_string(message, 4)
            else [_device_of_claim(name) for name in names]
        )
    return [_device_of_claim(name) for name in names if name.startswith(_CDI_KINDS)]


def _device_of_claim(name: str) -> str:
    device = name.partition("=")[2]
    before, found, after = device.rpartition("-gpu-")
    return f"gpu-{after}" if found and before else device


def _read_fields(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the length-delimited fields with a number.

    Raises:
        ValueError: this is not a protobuf message.
    """
    at = 0
    while at < len(message):
        key, at = _read_varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            _, at = _read_varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            at += 8 if kind == _FIXED64 else 4
        elif kind == _BYTES:
            length, at = _read_varint(message, at)
            if at + length > len(message):
                break
            if number == wanted:
                yield message[at : at + length]
            at += length
        else:
            break
    if at != len(message):
        error = "this is not a protobuf message"
        raise ValueError(error)


def _read_string(message: bytes, wanted: int) -> str:
    """Return a string field, empty when it is not set; the last one counts."""
    *_, last = b"", *_read_fields(message, wanted)
    return last.decode(errors="replace")


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_LONGEST_VARINT):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:  # noqa: PLR2004 the last byte of a number
            return value, at
    error = "this is not a protobuf message"
    raise ValueError(error)
