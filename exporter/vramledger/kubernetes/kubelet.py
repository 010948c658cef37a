"""Read which devices the kubelet gave to pods, from its pod-resources socket (v1: Kubernetes 1.28).

``List`` names the devices of every container, by the device plugin's ids and by DRA claims;
``GetAllocatableResources`` those that the plugins offer. A DRA claim names a device only in the words of its
driver (``gpu-0-mig-9-4-4``). Its UUID is in that driver's checkpoint, by its documentation: beside
``device``, in a member whose name has changed, so it is searched for.

grpcio is too large: a bare Python grows from 8.6 to 36.8 MiB, and has six more threads (Python 3.11, grpcio
1.85.1). One request with an empty message and one answer need little of HTTP/2. No header is decoded, and
flow control is one window that is wide enough (RFC 9113).
"""

from __future__ import annotations

import re
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vramledger.exchange import by, read_json
from vramledger.model.reading import Grant, Scheduler
from vramledger.readers.owners.host_files import HostFiles

MAX_MESSAGE = 16 * 1024 * 1024
"""The maximum length of an answer, in bytes; one device takes about 60 bytes."""

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_ACK = _END_STREAM = 1
_END_HEADERS = 4
_PADDED = 8
_ENABLE_PUSH, _INITIAL_WINDOW = 2, 4
_DEFAULT_WINDOW = 65_535
_FRAME_MAX = 16_384
"""The maximum length of a frame that a peer may send by default, in bytes."""

_STREAM = 1


class GrpcError(Exception):
    """The call has no answer; the message says why."""


class _Http2Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


def call_method(path: str, method: str, timeout: float) -> bytes:
    """Call a method that takes an empty message, and return the message of its answer."""
    deadline = time.monotonic() + timeout
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            by(deadline, connection).connect(path)
            by(deadline, connection).sendall(_encode_request(method))
            return _parse_message(_read_body(connection, deadline))
    except (OSError, ValueError) as error:
        raise GrpcError(str(error) or type(error).__name__) from error


def _encode_request(method: str) -> bytes:
    """Encode everything that is sent: preface, settings, a wide window, the request and its empty message."""
    settings = struct.pack("!HIHI", _ENABLE_PUSH, 0, _INITIAL_WINDOW, MAX_MESSAGE)
    window = struct.pack("!I", MAX_MESSAGE - _DEFAULT_WINDOW)
    headers = b"".join(
        _encode_header(name, value)
        for name, value in (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
        )
    )
    return b"".join(
        (
            _PREFACE,
            _encode_frame(_SETTINGS, 0, 0, settings),
            _encode_frame(_WINDOW, 0, 0, window),
            _encode_frame(_HEADERS, _END_HEADERS, _STREAM, headers),
            _encode_frame(_DATA, _END_STREAM, _STREAM, bytes(5)),  # not compressed, of length 0
        )
    )


def _encode_header(name: str, value: str) -> bytes:
    """Write a header as a literal without indexing or Huffman code (RFC 7541, 6.2.2), below 127 bytes."""
    words = (name.encode("ascii"), value.encode("ascii"))
    return b"\0" + b"".join(bytes((len(word),)) + word for word in words)


def _encode_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _read_frames(connection: socket.socket, deadline: float) -> Iterator[_Http2Frame]:
    data = bytearray()
    while True:
        while len(data) >= 9:  # noqa: PLR2004 the length of a frame's head
            length = int.from_bytes(data[:3], "big")
            if length > _FRAME_MAX:
                raise GrpcError("what listens there does not speak HTTP/2")
            if len(data) < 9 + length:
                break
            kind, flags, stream = struct.unpack("!BBI", data[3:9])
            yield _Http2Frame(kind, flags, stream & 0x7FFFFFFF, bytes(data[9 : 9 + length]))
            del data[: 9 + length]
        chunk = by(deadline, connection).recv(65_536)
        if not chunk:
            return
        data += chunk


def _read_body(connection: socket.socket, deadline: float) -> bytes:
    body = bytearray()
    for frame in _read_frames(connection, deadline):
        if frame.kind == _SETTINGS and not frame.flags & _ACK:
            by(deadline, connection).sendall(_encode_frame(_SETTINGS, _ACK, 0, b""))
        elif frame.kind == _PING and not frame.flags & _ACK:
            by(deadline, connection).sendall(_encode_frame(_PING, _ACK, 0, frame.payload))
        elif frame.kind == _GOAWAY:
            raise GrpcError("it refuses the connection")
        elif frame.stream == _STREAM:
            if frame.kind == _RESET:
                raise GrpcError("it has reset the call")
            if frame.kind == _DATA:
                body += _strip_padding(frame)
                if len(body) > MAX_MESSAGE:
                    raise GrpcError(f"its answer is longer than {MAX_MESSAGE} bytes")
            if frame.kind in (_DATA, _HEADERS) and frame.flags & _END_STREAM:
                return bytes(body)
    raise GrpcError("it closed the connection without an answer")


def _strip_padding(frame: _Http2Frame) -> bytes:
    if not frame.flags & _PADDED:
        return frame.payload
    return frame.payload[1 : len(frame.payload) - frame.payload[0]] if frame.payload else b""


def _parse_message(body: bytes) -> bytes:
    """Return the one message of a body: a failed call has none, and its status is in headers alone."""
    if len(body) < 5:  # noqa: PLR2004 whether it is compressed, and its length
        raise GrpcError("it refused the call")
    if body[0]:
        raise GrpcError("its answer is compressed, which was not requested")
    length = int.from_bytes(body[1:5], "big")
    if len(body) != 5 + length:
        raise GrpcError("its answer is cut short")
    return body[5:]


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
    """Read from the kubelet of a host; None without an answer within twice :data:`TIMEOUT`."""
    path = rootfs / SOCKET
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            return None
        grants = tuple(parse_grants(call_method(str(path), f"{_SERVICE}List", TIMEOUT)))
        uuids = read_dra_devices(rootfs)
        grants = tuple(
            each._replace(devices=tuple(uuids.get(name, name) for name in each.devices)) for each in grants
        )
    except (OSError, GrpcError, ValueError):
        return None
    try:
        managed = parse_allocatable(call_method(str(path), f"{_SERVICE}GetAllocatableResources", TIMEOUT))
    except (GrpcError, ValueError):
        managed = ()  # an older kubelet: only what it has assigned is known
    if is_dra_running(rootfs):
        managed = (*managed, "*")  # the driver offers every GPU of its node, granted before or not
    return Scheduler(NAME, managed, grants)


def parse_grants(message: bytes) -> Iterator[Grant]:
    """Read a ``ListPodResourcesResponse``: one grant for each pod with GPUs. Raises ValueError."""
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
    """Read the GPUs of an ``AllocatableResourcesResponse``. Raises ValueError if it is something else."""
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
    """Return the device of a ``ClaimResource`` by its name in the driver's pool, else its CDI name."""
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
    """Yield the length-delimited fields with a number. Raises ValueError if this is not protobuf."""
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
        raise ValueError("this is not a protobuf message")


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
    raise ValueError("this is not a protobuf message")


CHECKPOINT = "var/lib/kubelet/plugins/gpu.nvidia.com/checkpoint.json"
REGISTRY = "var/lib/kubelet/plugins_registry"
VERSIONS = ("v1", "v2", "v3")
"""The later ones count."""

_CAP = 8 * 2**20
_DEPTH = 12
_UUID = re.compile(r"(?:GPU|MIG)-[0-9a-f-]{36}", re.ASCII)
_SOCKET = re.compile(r"gpu\.nvidia\.com(?:-[\w-]+)?-reg\.sock", re.ASCII)


def is_dra_running(rootfs: Path) -> bool:
    """Tell whether the driver is registered with the kubelet: a checkpoint alone may be one of long ago."""
    names = HostFiles(rootfs).list_names(REGISTRY) or ()
    for name in names:
        if _SOCKET.fullmatch(name):
            try:
                return stat.S_ISSOCK((rootfs / REGISTRY / name).stat().st_mode)
            except OSError:
                return False
    return False


def read_dra_devices(rootfs: Path) -> Mapping[str, str]:
    """Return the UUIDs of prepared devices by their names; empty without such a driver."""
    data = HostFiles(rootfs).read(CHECKPOINT, _CAP)
    return {} if data is None else parse_devices(data)


def parse_devices(data: bytes) -> dict[str, str]:
    """Read a checkpoint; what is not understood is left out."""
    try:
        checkpoint = read_json(data)
    except ValueError:
        return {}
    found: dict[str, str] = {}
    for version in VERSIONS:
        content = checkpoint.get(version) if isinstance(checkpoint, dict) else None
        claims = content.get("preparedClaims") if isinstance(content, dict) else None
        found.update(_prepared(claims, _DEPTH))
    return found


def _prepared(value: Any, depth: int) -> Iterator[tuple[str, str]]:  # noqa: ANN401 another program's JSON
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
