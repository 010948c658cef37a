"""Make one unary gRPC call over a Unix socket, by HTTP/2 with prior knowledge; enough for the kubelet.

grpcio can do it too, but is too large: with it a bare Python grows from 8.6 to 36.8 MiB and has six more
threads (Python 3.11, grpcio 1.85.1). All processes of the exporter together may use 82 MiB. One request with
an empty message and one answer need little of HTTP/2. No header is ever decoded, as the answer is one message
or none. Flow control is one window that is wide enough (RFC 9113).
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

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
            connection.settimeout(timeout)
            connection.connect(path)
            connection.sendall(_encode_request(method))
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
    """Yield what the peer sends until it closes the connection."""
    data = bytearray()
    while True:
        while len(data) >= 9:  # noqa: PLR2004 the length of a frame's head
            length = int.from_bytes(data[:3], "big")
            if length > _FRAME_MAX:
                message = "what listens there does not speak HTTP/2"
                raise GrpcError(message)
            if len(data) < 9 + length:
                break
            kind, flags, stream = struct.unpack("!BBI", data[3:9])
            yield _Http2Frame(kind, flags, stream & 0x7FFFFFFF, bytes(data[9 : 9 + length]))
            del data[: 9 + length]
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        connection.settimeout(remaining)
        chunk = connection.recv(65_536)
        if not chunk:
            return
        data += chunk


def _read_body(connection: socket.socket, deadline: float) -> bytes:
    """Collect the body of the answer."""
    body = bytearray()
    for frame in _read_frames(connection, deadline):
        if frame.kind == _SETTINGS and not frame.flags & _ACK:
            connection.sendall(_encode_frame(_SETTINGS, _ACK, 0, b""))
        elif frame.kind == _PING and not frame.flags & _ACK:
            connection.sendall(_encode_frame(_PING, _ACK, 0, frame.payload))
        elif frame.kind == _GOAWAY:
            message = "it refuses the connection"
            raise GrpcError(message)
        elif frame.stream == _STREAM:
            if frame.kind == _RESET:
                message = "it has reset the call"
                raise GrpcError(message)
            if frame.kind == _DATA:
                body += _strip_padding(frame)
                if len(body) > MAX_MESSAGE:
                    message = f"its answer is longer than {MAX_MESSAGE} bytes"
                    raise GrpcError(message)
            if frame.kind in (_DATA, _HEADERS) and frame.flags & _END_STREAM:
                return bytes(body)
    message = "it closed the connection without an answer"
    raise GrpcError(message)


def _strip_padding(frame: _Http2Frame) -> bytes:
    if not frame.flags & _PADDED:
        return frame.payload
    return frame.payload[1 : len(frame.payload) - frame.payload[0]] if frame.payload else b""


def _parse_message(body: bytes) -> bytes:
    """Return the one message of a body: a failed call has none, and its status is in headers alone."""
    if len(body) < 5:  # noqa: PLR2004 whether it is compressed, and its length
        message = "it refused the call"
        raise GrpcError(message)
    if body[0]:
        message = "its answer is compressed, which was not requested"
        raise GrpcError(message)
    length = int.from_bytes(body[1:5], "big")
    if len(body) != 5 + length:
        message = "its answer is cut short"
        raise GrpcError(message)
    return body[5:]
