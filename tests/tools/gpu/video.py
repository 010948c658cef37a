"""Decode video and pictures with the GPU's own decoders, by libraries of the driver and of torchvision."""

from __future__ import annotations

import ctypes
import importlib
import random
from collections.abc import Callable
from typing import Any

from tests.tools.recordings.programs import gpu

WIDTH, HEIGHT = 1280, 720
FRAMES = 8
SURFACES = 4
_H264, _YUV420, _NV12, _WEAVE = 4, 1, 0, 0
_PREFER_CUVID = 4
_END_OF_PICTURE = 8

Decode = Callable[[], int]
"""Decodes some pictures and returns how many."""


def libraries() -> dict[str, str]:
    """Return of each library for video whether it can be loaded."""
    names = ("libnvcuvid.so.1", "libnvidia-encode.so.1", "libnvidia-opticalflow.so.1", "libnvjpeg.so.13")
    found = {}
    for name in names:
        try:
            ctypes.CDLL(name)
            found[name] = "loaded"
        except OSError as error:
            found[name] = str(error)[:120]
    return found


class _Bits:
    """Bits of an H.264 stream."""

    def __init__(self) -> None:
        self._text = ""

    def fixed(self, value: int, width: int) -> _Bits:
        """Append a number of so many bits."""
        self._text += format(value, f"0{width}b")
        return self

    def golomb(self, *values: int) -> _Bits:
        """Append unsigned exponential Golomb codes."""
        for value in values:
            code = format(value + 1, "b")
            self._text += "0" * (len(code) - 1) + code
        return self

    def align(self) -> bytes:
        """Return all, filled up with zeros."""
        return int(self._text + "0" * (-len(self._text) % 8), 2).to_bytes((len(self._text) + 7) // 8, "big")

    def finish(self) -> bytes:
        """Return all with the stop bit."""
        self._text += "1"
        return self.align()


def _unit(head: int, payload: bytes) -> bytes:
    """Return a NAL unit: 00 00 must not be followed by a byte below 4."""
    out, zeros = bytearray(b"\x00\x00\x00\x01" + bytes([head])), 0
    for byte in payload:
        if zeros >= 2 and byte < 4:
            out.append(3)
            zeros = 0
        out.append(byte)
        zeros = zeros + 1 if byte == 0 else 0
    return bytes(out)


def stream() -> list[bytes]:
    """Return pictures of noise as H.264, each complete by itself: macroblocks of plain samples (I_PCM)."""
    across, down = WIDTH // 16, HEIGHT // 16
    sequence = _Bits().fixed(66, 8).fixed(0, 8).fixed(40, 8).golomb(0, 0, 2, 1).fixed(0, 1)
    sequence.golomb(across - 1, down - 1).fixed(0b1100, 4)  # frames only, 8x8 inference, no crop, no more
    picture = _Bits().golomb(0, 0).fixed(0, 2).golomb(0, 0, 0).fixed(0, 3).golomb(0, 0, 0).fixed(0, 3)
    heads = _unit(0x67, sequence.finish()) + _unit(0x68, picture.finish())
    noise = random.Random(1)  # noqa: S311 a picture, no secret
    frames = []
    for number in range(FRAMES):
        # first macroblock, type I, parameter set; frame number; IDR number; marking; quantiser
        slice_ = _Bits().golomb(0, 7, 0).fixed(0, 4).golomb(number % 2).fixed(0, 2).golomb(0)
        body = bytearray(slice_.golomb(25).align())
        for block in range(across * down):
            if block:
                body += _Bits().golomb(25).align()
            body += bytes(noise.choices(range(16, 236), k=384))
        frames.append(heads + _unit(0x65, bytes(body) + b"\x80"))
    return frames


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _ParserParameters(ctypes.Structure):
    _fields_ = (
        ("codec", ctypes.c_int), ("surfaces", ctypes.c_uint), ("clock", ctypes.c_uint),
        ("errors", ctypes.c_uint), ("delay", ctypes.c_uint), ("annex", ctypes.c_uint),
        ("reserved", ctypes.c_uint * 4), ("user", ctypes.c_void_p), ("sequence", _CALLBACK),
        ("decode", _CALLBACK), ("display", _CALLBACK), ("more", ctypes.c_void_p * 8),
    )  # fmt: skip


class _DecoderParameters(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_ulong), ("height", ctypes.c_ulong), ("surfaces", ctypes.c_ulong),
        ("codec", ctypes.c_int), ("chroma", ctypes.c_int), ("flags", ctypes.c_ulong),
        ("depth", ctypes.c_ulong), ("intra", ctypes.c_ulong), ("most_width", ctypes.c_ulong),
        ("most_height", ctypes.c_ulong), ("reserved", ctypes.c_ulong), ("area", ctypes.c_short * 4),
        ("format", ctypes.c_int), ("deinterlace", ctypes.c_int), ("target_width", ctypes.c_ulong),
        ("target_height", ctypes.c_ulong), ("outputs", ctypes.c_ulong), ("lock", ctypes.c_void_p),
        ("rect", ctypes.c_short * 4), ("histogram", ctypes.c_ulong), ("rest", ctypes.c_ulong * 4),
    )  # fmt: skip


class _Packet(ctypes.Structure):
    _fields_ = (
        ("flags", ctypes.c_ulong), ("size", ctypes.c_ulong), ("payload", ctypes.c_char_p),
        ("time", ctypes.c_longlong),
    )  # fmt: skip


class _Nvdec:
    """The decoder of the driver, by libnvcuvid."""

    def __init__(self, device: int) -> None:
        self._context = gpu.Cuda(device)
        self._lib = ctypes.CDLL("libnvcuvid.so.1")
        self._decoder, self._parser = ctypes.c_void_p(), ctypes.c_void_p()
        self._frames, self._count, self._codes = stream(), 0, set[int]()
        wanted = _DecoderParameters(
            width=WIDTH, height=HEIGHT, surfaces=SURFACES, codec=_H264, chroma=_YUV420, flags=_PREFER_CUVID,
            most_width=WIDTH, most_height=HEIGHT, area=(0, 0, WIDTH, HEIGHT), format=_NV12,
            deinterlace=_WEAVE, target_width=WIDTH, target_height=HEIGHT, outputs=1,
        )  # fmt: skip
        self._call("cuvidCreateDecoder", ctypes.byref(self._decoder), ctypes.byref(wanted))
        self._kept = _ParserParameters(
            codec=_H264, surfaces=SURFACES, errors=100, delay=0, annex=0,
            sequence=_CALLBACK(lambda *_: SURFACES), decode=_CALLBACK(self._decode),
            display=_CALLBACK(lambda *_: 1),
        )  # fmt: skip
        self._call("cuvidCreateVideoParser", ctypes.byref(self._parser), ctypes.byref(self._kept))

    def _decode(self, _: object, picture: int) -> int:
        code = self._lib.cuvidDecodePicture(self._decoder, ctypes.c_void_p(picture))
        self._codes.add(code)
        self._count += code == 0
        return int(code == 0)

    def __call__(self) -> int:
        """Decode all pictures once."""
        before = self._count
        for frame in self._frames:
            packet = _Packet(_END_OF_PICTURE, len(frame), frame, 0)
            self._call("cuvidParseVideoData", self._parser, ctypes.byref(packet))
        if self._count == before:
            message = f"nothing was decoded: {sorted(self._codes)}"
            raise RuntimeError(message)
        return self._count - before

    def _call(self, name: str, *arguments: Any) -> None:  # noqa: ANN401
        if code := getattr(self._lib, name)(*arguments):
            message = f"{name}: {code}"
            raise RuntimeError(message)


def _jpeg(device: int) -> Decode:
    """Return a decoder of JPEG pictures, by torchvision."""
    torch: Any = importlib.import_module("torch")
    pictures: Any = importlib.import_module("torchvision.io")
    small = (torch.rand(1, 3, 135, 240) * 255).float()
    picture = torch.nn.functional.interpolate(small, scale_factor=8)[0].to(torch.uint8)
    many = [pictures.encode_jpeg(picture, quality=90)] * 32

    def decode() -> int:
        pictures.decode_jpeg(many, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        return len(many)

    return decode


DECODERS: dict[str, Callable[[int], Decode]] = {"H.264": _Nvdec, "JPEG": _jpeg}
